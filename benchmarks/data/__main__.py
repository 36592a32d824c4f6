"""Benchmarks of data: plane between driver and ranks, packing, recorded episodes, conversations."""

from benchmarks.harness import run_program

PROGRAMS = {
    "plane": "plane",
    "packing": "packing",
    "episodes": "episodes",
    "conversations": "conversations",
}

if __name__ == "__main__":
    run_program("benchmarks.data", PROGRAMS)
