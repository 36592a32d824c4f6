"""Full-size conversion on a small machine: makes a synthetic MXFP4 checkpoint, imports it, reports speed and memory.

    python benchmarks/conversion.py make DIRECTORY [--layers 24] [--experts 32]
    python benchmarks/conversion.py measure HF_DIRECTORY MEGATRON_DIRECTORY

``measure`` drops the source from the page cache, writes 4 GB to the same disk as its own speed, imports in a process of
its own and compares. It needs room for three times the source. The import stays where it was written.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from converters.hf_directory import write_hf_directory, written_shapes
from megatron_gptoss.config import ModelConfig

PROBE_BYTES = 4_000_000_000  # far more than a disk cache


def synthetic_tensors(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Random codes, scales of 2**-9 to 2**-6, other weights normal; drawn once, each tensor from another place."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (1 << 25,), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 122, (1 << 22,), dtype=torch.uint8, generator=generator)
    floats = (torch.randn(1 << 22, generator=generator) * 0.02).bfloat16()
    for number, (name, shape) in enumerate(written_shapes(config, quantised=True).items()):
        source = codes if name.endswith("_blocks") else scales if name.endswith("_scales") else floats
        count = torch.Size(shape).numel()
        yield name, source.roll(number * 7919).repeat(-(-count // source.numel()))[:count].view(shape)


def make(directory: Path, layers: int, experts: int) -> None:
    config = ModelConfig(num_layers=layers, num_experts=experts)
    write_hf_directory(directory, config, synthetic_tensors(config), quantised=True)
    print(f"{directory}: {directory_bytes(directory) / 1e9:.2f} GB")


def measure(source: Path, target: Path) -> None:
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    before = write_speed(target.parent)
    print(f"disk: {before / 1e9:.3f} GB/s")
    for file in source.glob("*.safetensors"):
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    code = "import sys; from converters.torch_dist import import_checkpoint; import_checkpoint(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", code, str(source), str(target)], check=True)
    seconds = time.perf_counter() - began
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    written = directory_bytes(target)
    print(f"load average {os.getloadavg()[0]:.1f}")
    after = write_speed(target.parent)
    disk = (before + after) / 2
    print(
        f"import: {directory_bytes(source) / 1e9:.2f} GB -> {written / 1e9:.2f} GB in {seconds:.1f} s, "
        f"{written / seconds / 1e9:.3f} GB/s written; {usage.ru_utime + usage.ru_stime:.0f} s of CPU; "
        f"peak resident {usage.ru_maxrss / 1e6:.2f} GB"
    )
    print(
        f"disk: {before / 1e9:.3f} GB/s before, {after / 1e9:.3f} GB/s after; import at {written / seconds / disk:.0%} "
        "of their mean"
    )


def write_speed(directory: Path) -> float:
    """Bytes per second of one sequential write, until it is on the disk."""
    path, block = directory / "write_speed_probe", os.urandom(1 << 26)
    os.sync()  # what others have left to write
    began = time.perf_counter()
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(PROBE_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        return PROBE_BYTES // len(block) * len(block) / (time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)


def directory_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make")
    made.add_argument("directory", type=Path)
    made.add_argument("--layers", type=int, default=24)
    made.add_argument("--experts", type=int, default=32)
    measured = commands.add_parser("measure")
    measured.add_argument("source", type=Path)
    measured.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.directory, arguments.layers, arguments.experts)
    else:
        measure(arguments.source, arguments.target)


if __name__ == "__main__":
    main()
