"""Benchmarks of the gateway: time added to a request, and many sessions over a long time."""

from benchmarks.harness import run_program

PROGRAMS = {
    "requests": "requests",
    "load": "load",
}

if __name__ == "__main__":
    run_program("benchmarks.gateway", PROGRAMS)
