"""Tests the first use of the MXFP4 codec by eight threads at once, in many new processes.

python tests/support/kernels/mxfp4_first_use.py [PROCESSES]

Prints the number of processes with a wrong value and exits with 1 if there are any. Each process is
a fork of this one, which has loaded torch but not the codec, so 200 of them take seconds.
"""

import os
import sys
import threading

import torch

THREADS = 8
ROUNDS = 3
VALUES = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64
)


def main() -> None:
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    if any(name.startswith("gptoss_kernels") for name in sys.modules):
        raise RuntimeError("the codec is loaded already: its first use would not be tested")

    # torch's thread pools do not survive a fork.
    torch.set_num_threads(1)

    wrong = [seed for seed in range(processes) if not runs_in_a_fork(seed)]
    print(f"{len(wrong)} of {processes} processes gave wrong values or died: {wrong}")
    sys.exit(1 if wrong else 0)


def runs_in_a_fork(seed: int) -> bool:
    """Return True if a forked process computed all values correctly."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if threads_agree(seed) else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def threads_agree(seed: int) -> bool:
    """Return True if eight concurrent threads match fp64 arithmetic and reproduce the bytes."""
    sys.setswitchinterval(1e-6)
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (64, 96, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (64, 96), dtype=torch.uint8, generator=generator)
    values = dequantize_in_fp64(blocks, scales)

    # Most processes import the codec first, so that only its first use is concurrent.
    if seed % 4:
        import gptoss_kernels.mxfp4  # noqa: F401

    # The two directions have separate tables. Their order decides which of them is built
    # concurrently.
    round_trip = quantize_first if seed % 2 else dequantize_first

    barrier = threading.Barrier(THREADS)
    right = [False] * THREADS

    def work(index: int) -> None:
        mine = [x[index::THREADS].contiguous() for x in (blocks, scales, values)]
        barrier.wait()
        right[index] = all(round_trip(*mine) for _ in range(ROUNDS))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all(right)


def quantize_first(blocks: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> bool:
    return quantize_is_right(blocks, scales, values) and dequantize_is_right(blocks, scales, values)


def dequantize_first(blocks: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> bool:
    return dequantize_is_right(blocks, scales, values) and quantize_is_right(blocks, scales, values)


def quantize_is_right(blocks: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> bool:
    from gptoss_kernels import mxfp4

    again, again_scales = mxfp4.quantize(values, scales)
    return torch.equal(again, blocks) and torch.equal(again_scales, scales)


def dequantize_is_right(blocks: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> bool:
    from gptoss_kernels import mxfp4

    dequantized = mxfp4.dequantize(blocks, scales)
    return torch.equal(dequantized.view(torch.int16), values.view(torch.int16))


def dequantize_in_fp64(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize uint8 [..., n, 16] and [..., n] to bf16 [..., n * 32], without the codec."""
    low, high = VALUES[(blocks & 15).long()], VALUES[(blocks >> 4).long()]
    pairs = torch.stack((low, high), dim=-1).flatten(-2)
    return (pairs * torch.exp2(scales.double() - 127)[..., None]).to(torch.bfloat16).flatten(-2)


if __name__ == "__main__":
    main()
