"""Benchmarks of the whole RL loop at full size, and of its recovery after kills."""

from benchmarks.harness import run_program

PROGRAMS = {
    "kills": "kills",
}
DEFAULT = "run"
"""Module that reads the command line unless its first word names a program."""

if __name__ == "__main__":
    run_program("benchmarks.loop", PROGRAMS, DEFAULT)
