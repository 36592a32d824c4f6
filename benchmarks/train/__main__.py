"""Benchmarks of training steps, of all weights and of adapters."""

from benchmarks.harness import run_program

PROGRAMS = {
    "adapters": "adapters",
    "adapter-checkpoint": "adapter_checkpoint",
    "passes": "passes",
    "shared-prefixes": "shared_prefixes",
}
DEFAULT = "cases"
"""Module that reads the command line unless its first word names a program.

It has the commands ``step``, ``memory`` and ``stock``, as in ``python -m benchmarks.train step``.
"""

if __name__ == "__main__":
    run_program("benchmarks.train", PROGRAMS, DEFAULT)
