"""Benchmarks of experts: GEMMs of SGLang's plugin, adapters in them, tuning of SGLang's MoE kernel, expert load."""

from benchmarks.harness import run_program

PROGRAMS = {
    "gemms": "gemms",
    "adapters": "adapters",
    "tune": "tuning",
    "load": "load",
}

if __name__ == "__main__":
    run_program("benchmarks.experts", PROGRAMS)
