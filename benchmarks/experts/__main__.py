"""Expert GEMMs of SGLang"s plugin, settings of its MoE kernel, and the load of experts."""

from benchmarks.harness import run_program

PROGRAMS = {
    "products": "products",
    "tune": "tuning",
    "load": "load",
}

if __name__ == "__main__":
    run_program("benchmarks.experts", PROGRAMS)
