"""The ``gptoss`` command, a module for each group of its commands.

The shell imports these modules whenever the tab key is pressed, and arguments are checked before
anything heavy is imported, so that a mistake is answered at once. That is why most imports of
these modules are inside their functions, the schema of configurations included.
"""

from launch.cli.command_line import app, main

__all__ = ["app", "main"]
