"""Benchmarks of sandboxes: start, memory, commands and forks of shells."""

from benchmarks.harness import run_program

PROGRAMS = {"shell": "shell"}
DEFAULT = "python_calls"
"""Module that measures the Python sandbox. It reads the command line unless its first word names a
program."""

if __name__ == "__main__":
    run_program("benchmarks.sandbox", PROGRAMS, DEFAULT)
