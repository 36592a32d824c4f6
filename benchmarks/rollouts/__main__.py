"""Benchmarks of rollouts: concurrent episodes, rollouts ahead of training, time of a turn."""

from benchmarks.harness import run_program

PROGRAMS = {
    "concurrent": "concurrent",
    "simulate": "simulation",
    "staleness": "staleness",
    "turns": "turn_cost",
}

if __name__ == "__main__":
    run_program("benchmarks.rollouts", PROGRAMS)
