"""Benchmarks of SGLang: weight sync, decoding, memory, certification."""

from benchmarks.harness import run_program

PROGRAMS = {
    "memory": "memory",
    "certify": "certify",
    "profile": "decoding_profile",
}
DEFAULT = "cases"
"""Module that reads the command line unless its first word names a program."""

if __name__ == "__main__":
    run_program("benchmarks.sglang", PROGRAMS, DEFAULT)
