"""Benchmarks of the whole RL loop at full size, of its rollouts, and of recovery after kills."""

from benchmarks.harness import run_program

PROGRAMS = {
    "kills": "kills",
    "split": "rollout_split",
}
DEFAULT = "run"
"""Module that reads the command line unless its first word names a program."""

if __name__ == "__main__":
    run_program("benchmarks.loop", PROGRAMS, DEFAULT)
