"""The gateway: what it adds to a request, and many sessions for long."""

from benchmarks.harness import run_program

PROGRAMS = {
    "requests": "requests",
    "load": "load",
}

if __name__ == "__main__":
    run_program("benchmarks.gateway", PROGRAMS)
