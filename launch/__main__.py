"""``python -m launch`` is ``gptoss`` in jobs, whose code is a snapshot and not installed."""

from launch.cli import main

main()
