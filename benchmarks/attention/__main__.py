"""Benchmarks of attention with sinks: kernels, packed batches, context parallelism."""

from benchmarks.harness import run_program

PROGRAMS = {
    "kernels": "kernels",
    "packed": "packed",
    "context": "context",
}

if __name__ == "__main__":
    run_program("benchmarks.attention", PROGRAMS)
