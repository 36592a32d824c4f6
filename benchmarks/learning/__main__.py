"""Training runs that are compared with each other."""

from benchmarks.harness import run_program

PROGRAMS = {
    "ablations": "ablations",
    "quantization": "quantization",
    "agents": "agents",
    "branches": "branches",
    "comparison": "comparison",
    "reference-model": "reference_model",
    "healed-model": "healed_model",
    "claims": "claims",
    "tinker": "tinker_demo",
}

if __name__ == "__main__":
    run_program("benchmarks.learning", PROGRAMS)
