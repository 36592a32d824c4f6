"""Benchmarks of checkpoint conversion and of MXFP4 encoding."""

from benchmarks.harness import run_program

PROGRAMS = {
    "mxfp4": "mxfp4",
}
DEFAULT = "conversion"
"""Module that reads the command line unless its first word names a program."""

if __name__ == "__main__":
    run_program("benchmarks.converters", PROGRAMS, DEFAULT)
