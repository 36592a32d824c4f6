"""The ``gptoss`` command, with a module per group of commands.

The shell imports these modules when the tab key is pressed, and arguments are checked before heavy
imports, so that errors appear at once. Therefore most imports of these modules are inside
functions, including the schema of configurations.
"""

from launch.cli.command_line import app, main

__all__ = ["app", "main"]
