"""Runs the numeric tests with the kernels of other x86-64 processors, with 1 and 2 threads.

    python scripts/numeric_tests.py            # all numeric tests on all supported processors
    python scripts/numeric_tests.py --sample   # a few files and two processors, for CI

Four libraries choose kernels by processor: OpenBLAS (numpy), ATen, MKL, and oneDNN (torch). A
processor here is one choice for each. Other arguments are passed to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUMERIC = [
    "tests/kernels",
    "tests/megatron_gptoss",
    "tests/converters",
    "tests/rl_loop/algorithms",
    "tests/rl_loop/engines",
    "tests/rl_loop/certify",
    "tests/rl_loop/weight_sync/test_canary.py",
    "tests/test_tolerances.py",
]
SAMPLE = [
    "tests/test_tolerances.py",
    "tests/rl_loop/engines/test_window_attention.py",
    "tests/rl_loop/algorithms/test_algorithms.py",
    "tests/kernels/test_sink_attention_reference.py",
    "tests/kernels/test_sink_attention_functional.py",
    "tests/megatron_gptoss/test_log_probs.py",
    "tests/megatron_gptoss/test_merge.py",
    "tests/megatron_gptoss/test_router.py",
]
SELECTION = "not gpu and not slurm and not slow and not browser"
THREADS = (1, 2)

PROBE = """
import ctypes, pathlib, numpy, torch
(library,) = pathlib.Path(numpy.__file__).parents[1].glob("numpy.libs/*openblas*.so")
name = ctypes.CDLL(str(library)).scipy_openblas_get_corename64_
name.restype = ctypes.c_char_p
print(name().decode(), torch.backends.cpu.get_cpu_capability().lower())
"""


@dataclass(frozen=True)
class Processor:
    """Choice of the libraries' kernels for one kind of processor."""

    openblas: str
    """Value of OPENBLAS_CORETYPE, for products of numpy."""
    aten: str
    """Value of ATEN_CPU_CAPABILITY, for torch's elementwise kernels and sums."""
    mkl: str
    """Value of MKL_CBWR, for torch's products in fp32 and fp64."""
    onednn: str
    """Value of ONEDNN_MAX_CPU_ISA, for torch's products in bf16."""
    flags: frozenset[str]
    """Flags in /proc/cpuinfo that the kernels need."""
    reported: str | None = None
    """Name that OpenBLAS reports if it differs from ``openblas``."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that select the kernels."""
        return {
            "OPENBLAS_CORETYPE": self.openblas,
            "ATEN_CPU_CAPABILITY": self.aten,
            "MKL_CBWR": self.mkl,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
        }


AVX2 = frozenset({"avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
PROCESSORS = [
    Processor("Sandybridge", "default", "COMPATIBLE", "AVX", frozenset({"avx"})),
    Processor("Haswell", "avx2", "AVX2", "AVX2", AVX2),
    # OpenBLAS has no separate GEMM kernels for Zen and uses Haswell's.
    Processor("Zen", "avx2", "AVX2", "AVX2", AVX2, reported="Haswell"),
    Processor("SkylakeX", "avx512", "AVX512", "AVX512_CORE", AVX512),
]
SAMPLED = [("Sandybridge", 2), ("Haswell", 1)]
"""Processors and threads of ``--sample``. ``make test`` uses this processor's own kernels."""


def processor_flags() -> set[str]:
    """Return the flags of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    raise SystemExit("/proc/cpuinfo: no line of flags. This command needs an x86-64 processor.")


def check_kernels(processor: Processor, environment: dict[str, str]) -> None:
    """Exit if the libraries did not select the requested kernels: they ignore unknown names."""
    found = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    expected = [processor.reported or processor.openblas, processor.aten]
    if found != expected:
        raise SystemExit(
            f"{processor.openblas}: numpy and torch took the kernels {found} (expected {expected})."
            " Check the installed versions of numpy and torch."
        )


def run(processor: Processor, threads: int, arguments: list[str]) -> bool:
    """Run pytest with the kernels of a processor.

    Args:
        processor: kernels to use.
        threads: value of OMP_NUM_THREADS.
        arguments: arguments of pytest.

    Returns:
        True if all tests passed.
    """
    environment = os.environ | processor.environment | {"OMP_NUM_THREADS": str(threads)}
    check_kernels(processor, environment)
    name = f"{processor.openblas}, {threads} thread{'s' if threads > 1 else ''}"
    print(f"== {name}", flush=True)
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-m", SELECTION, *arguments]
    passed = subprocess.run(command, cwd=ROOT, env=environment).returncode == 0
    print(f"== {name}: {'passed' if passed else 'FAILED'}, {time.monotonic() - start:.0f} s")
    return passed


def chosen_runs(options: argparse.Namespace) -> list[tuple[Processor, int]]:
    """Return (processor, threads) of each run. Unsupported processors are left out with a note."""
    has = processor_flags()
    runs = []
    for processor in PROCESSORS:
        counts = options.threads or THREADS
        if options.sample:
            counts = [threads for name, threads in SAMPLED if name == processor.openblas]
        if options.processor and processor.openblas not in options.processor:
            continue
        if missing := sorted(processor.flags - has):
            print(f"== {processor.openblas}: left out, this processor lacks {', '.join(missing)}")
            continue
        runs += [(processor, threads) for threads in counts]
    return runs


def main() -> None:
    """Run the tests and exit with 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", action="store_true", help="run a few files only")
    parser.add_argument(
        "--processor",
        action="append",
        choices=[processor.openblas for processor in PROCESSORS],
        help="only this one; may be given several times",
    )
    parser.add_argument("--threads", type=int, action="append", help="default: 1 and 2")
    options, arguments = parser.parse_known_args()
    if not any(argument.startswith("tests") for argument in arguments):
        arguments += SAMPLE if options.sample else NUMERIC

    runs = chosen_runs(options)
    if not runs:
        raise SystemExit("no processor to emulate: nothing was tested")
    failed = [
        f"{processor.openblas} with OMP_NUM_THREADS={threads}"
        for processor, threads in runs
        if not run(processor, threads, arguments)
    ]
    if failed:
        raise SystemExit(f"numeric tests fail: {', '.join(failed)}")


if __name__ == "__main__":
    main()
