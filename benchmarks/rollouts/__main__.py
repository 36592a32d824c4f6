"""Benchmarks of rollouts: many concurrent episodes, and rollouts that run ahead of training."""

from benchmarks.harness import run_program

PROGRAMS = {
    "concurrent": "concurrent",
    "simulate": "simulation",
    "staleness": "staleness",
}

if __name__ == "__main__":
    run_program("benchmarks.rollouts", PROGRAMS)
