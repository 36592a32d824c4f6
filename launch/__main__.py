"""``python -m launch`` is ``gptoss``, for jobs: their code is a snapshot and not an installation."""

from launch.cli import main

main()
