"""``python -m launch``: the ``gptoss`` command in jobs, whose code is a snapshot, not installed."""

from launch.cli import main

main()
