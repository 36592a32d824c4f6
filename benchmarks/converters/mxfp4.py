"""MXFP4 throughput on one CPU core, and on a GPU if there is one.

``python -m benchmarks.converters mxfp4`` prints GB/s of bf16 for the CPU, and fractions of the copy
bandwidth for the GPU.
"""

import argparse
import json
import timeit

import torch

from gptoss_kernels.mxfp4 import dequantize, quantize


def random_blocks_and_scales(count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random MXFP4 values: blocks [count, 16] and scales [count], both uint8."""
    blocks = torch.randint(0, 256, (count, 16), dtype=torch.uint8, device=device)
    scales = torch.randint(112, 122, (count,), dtype=torch.uint8, device=device)
    return blocks, scales


def measure_cpu() -> dict[str, float]:
    """Return GB/s of bf16 on one core: the best of 10 calls over 64 MB."""
    torch.set_num_threads(1)
    blocks, scales = random_blocks_and_scales(1_000_000, "cpu")
    out = torch.empty(blocks.shape[0] * 32, dtype=torch.bfloat16)
    calls = {
        "dequantize": lambda: dequantize(blocks, scales, out=out),
        "quantize": lambda: quantize(out),
        "quantize with hint": lambda: quantize(out, scales),
    }

    speeds = {}
    for name, call in calls.items():
        seconds = min(timeit.repeat(call, number=1, repeat=10))
        speeds[name] = out.nbytes / seconds / 1e9
    return speeds


def measure_gpu() -> dict[str, float]:
    """Return the copy bandwidth in TB/s, and each call's bandwidth as a fraction of it."""
    from benchmarks.harness import time_interleaved

    blocks, scales = random_blocks_and_scales(16_000_000, "cuda")
    out = torch.empty(blocks.shape[0] * 32, dtype=torch.bfloat16, device="cuda")
    dequantize(blocks, scales, out=out)  # gives ``quantize`` representable weights
    source = out.view(torch.float32)
    target = torch.empty_like(source)
    milliseconds = time_interleaved(
        {
            "copy": lambda: target.copy_(source),
            "dequantize": lambda: dequantize(blocks, scales, out=out),
            "quantize": lambda: quantize(out),
            "quantize with hint": lambda: quantize(out, scales),
        }
    )

    converted = out.nbytes + blocks.nbytes + scales.nbytes
    moved = {
        "dequantize": converted,
        "quantize": converted,
        "quantize with hint": converted + scales.nbytes,  # the hint is read, too
    }
    copy_speed = 2 * out.nbytes / milliseconds["copy"]
    result = {"copy TB/s": copy_speed / 1e9}
    for name, size in moved.items():
        result[name] = size / milliseconds[name] / copy_speed
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="write the figures as JSON")
    options = parser.parse_args()

    result = {"cpu GB/s of bf16, one core": measure_cpu()}
    if torch.cuda.is_available():
        result["gpu, share of copy bandwidth"] = measure_gpu()

    for title, row in result.items():
        print(title, {name: round(value, 3) for name, value in row.items()})
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)
