"""``python -m launch`` is ``gptoss``: jobs use it, where the code is a snapshot and not an installation."""

from launch.cli import main

main()
