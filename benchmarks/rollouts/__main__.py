"""Benchmarks of rollouts: concurrent episodes, asynchronous rollouts, time of a turn."""

from benchmarks.harness import run_program

PROGRAMS = {
    "concurrent": "concurrent",
    "simulate": "simulation",
    "asynchronous": "asynchronous",
    "turns": "turn_cost",
}

if __name__ == "__main__":
    run_program("benchmarks.rollouts", PROGRAMS)
