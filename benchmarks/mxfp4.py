"""MXFP4 throughput on one CPU core, and on a GPU where there is one.

python benchmarks/mxfp4.py [--out result.json]
"""

import argparse
import json
import timeit

import torch

from gptoss_kernels.mxfp4 import dequantize, quantize


def blocks_and_scales(count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(0, 256, (count, 16), dtype=torch.uint8, device=device)
    return blocks, torch.randint(112, 122, (count,), dtype=torch.uint8, device=device)


def cpu() -> dict[str, float]:
    """GB/s of bf16, best of ten over 64 MB of it."""
    torch.set_num_threads(1)
    blocks, scales = blocks_and_scales(1_000_000, "cpu")
    out = torch.empty(blocks.shape[0] * 32, dtype=torch.bfloat16)
    calls = {
        "dequantize": lambda: dequantize(blocks, scales, out=out),
        "quantize": lambda: quantize(out),
        "quantize with hint": lambda: quantize(out, scales),
    }
    return {name: out.numel() * 2 / min(timeit.repeat(call, number=1, repeat=10)) / 1e9 for name, call in calls.items()}


def gpu() -> dict[str, float]:
    """Bytes read plus written per second, as a share of a plain copy's, both measured interleaved here."""
    from timing import interleaved

    blocks, scales = blocks_and_scales(16_000_000, "cuda")
    out = torch.empty(blocks.shape[0] * 32, dtype=torch.bfloat16, device="cuda")
    dequantize(blocks, scales, out=out)
    source = out.view(torch.float32)
    target = torch.empty_like(source)
    times = interleaved(
        {
            "copy": lambda: target.copy_(source),
            "dequantize": lambda: dequantize(blocks, scales, out=out),
            "quantize": lambda: quantize(out),
            "quantize with hint": lambda: quantize(out, scales),
        }
    )
    wide, narrow = out.numel() * 2, blocks.numel() + scales.numel()
    copy = 2 * wide / times["copy"]
    result = {"copy TB/s": copy / 1e9}
    for name, moved in (("dequantize", wide + narrow), ("quantize", wide + narrow)):
        result[name] = moved / times[name] / copy
    result["quantize with hint"] = (wide + narrow + scales.numel()) / times["quantize with hint"] / copy
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    options = parser.parse_args()
    result = {"cpu GB/s of bf16, one core": cpu()}
    if torch.cuda.is_available():
        result["gpu, share of copy bandwidth"] = gpu()
    for title, row in result.items():
        print(title, {name: round(value, 3) for name, value in row.items()})
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
