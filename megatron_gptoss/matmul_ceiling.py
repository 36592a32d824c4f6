"""Measured speed of a large matrix product, as a ceiling for the speed of a step."""

import functools
from statistics import median

import torch


@functools.cache
def matmul_ceiling(size: int = 8192, rounds: int = 10) -> float:
    """Return the TFLOP/s of a bf16 product between two square matrices, measured once (0.05 s).

    Args:
        size: rows and columns of the matrices.
        rounds: number of measurements, of which the median is returned.
    """
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)

    milliseconds = []
    for _ in range(rounds + 2):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        a @ b
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))

    # The first two rounds are for warm-up. FLOP per millisecond times 1e-9 is TFLOP/s.
    return 2 * size**3 / median(milliseconds[2:]) / 1e9
