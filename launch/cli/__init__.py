"""The ``gptoss`` command, a module for each group of its commands.

Arguments are checked before anything heavy is imported, so that a mistake is answered at once.
That is why most imports of these modules are inside their functions.
"""

from launch.cli.command_line import app, main

__all__ = ["app", "main"]
