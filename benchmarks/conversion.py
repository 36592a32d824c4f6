"""Full-size conversion on a small machine: makes a synthetic MXFP4 checkpoint, imports it, reports speed and memory.

    python benchmarks/conversion.py make DIRECTORY [--layers 24] [--experts 32] [--vocabulary 201088]
    python benchmarks/conversion.py measure HF_DIRECTORY MEGATRON_DIRECTORY
    python benchmarks/conversion.py measure-export MEGATRON_DIRECTORY NEW_HF_DIRECTORY FORMAT [--reference HF_DIRECTORY]

``measure`` drops the source from the page cache, writes 4 GB to the same disk as its own speed, imports in a process of
its own and compares. It needs room for three times the source. The import stays where it was written.

Both measurements also say how much longer the conversion took because a sample was read back, as a share of the rest.
With fewer than 24 layers one layer is a larger share of the experts: a smaller vocabulary keeps the share of what is no
expert as in the 20B.
"""

from __future__ import annotations

import argparse
import json
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
    for number, (name, shape) in enumerate(written_shapes(config, quantized=True).items()):
        source = codes if name.endswith("_blocks") else scales if name.endswith("_scales") else floats
        count = torch.Size(shape).numel()
        yield name, source.roll(number * 7919).repeat(-(-count // source.numel()))[:count].view(shape)


def make(directory: Path, layers: int, experts: int, vocabulary: int) -> None:
    config = ModelConfig(num_layers=layers, num_experts=experts, vocab_size=vocabulary)
    write_hf_directory(directory, config, synthetic_tensors(config), quantized=True)
    print(f"{directory}: {directory_bytes(directory) / 1e9:.2f} GB")


def measure(source: Path, target: Path) -> None:
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    before = write_speed(target.parent)
    print(f"disk: {before / 1e9:.3f} GB/s")
    drop_from_cache(source)
    seconds, added = convert("import_checkpoint(*paths)", source, target)
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
    print_cost(seconds, added)


def measure_export(source: Path, target: Path, precision: str, reference: Path | None) -> None:
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    drop_from_cache(source)
    paths = [source, target] if reference is None else [source, target, reference]
    arguments = f"paths[0], paths[1], {precision!r}, paths[2] if len(paths) > 2 else None"
    seconds, added = convert(f"export_checkpoint({arguments}).read_back", *paths)
    print(
        f"export to {precision}: {directory_bytes(source) / 1e9:.2f} GB -> {directory_bytes(target) / 1e9:.2f} GB in "
        f"{seconds:.1f} s"
    )
    print_cost(seconds, added)


def convert(expression: str, *paths: Path) -> tuple[float, float]:
    """Seconds of a conversion in a process of its own, and those of them that reading back added."""
    code = (
        "import json, sys; from converters.torch_dist import export_checkpoint, import_checkpoint; "
        f"paths = sys.argv[1:]; result = {expression}; print(json.dumps([result.added_seconds, str(result)]))"
    )
    began = time.perf_counter()
    answer = subprocess.run([sys.executable, "-c", code, *map(str, paths)], check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    added, sentence = json.loads(answer.stdout.splitlines()[-1])
    print(sentence)
    return seconds, added


def print_cost(seconds: float, added: float) -> None:
    rest = seconds - added
    print(f"reading back added {added:.1f} s, {added / rest:.1%} of the other {rest:.1f} s")


def drop_from_cache(directory: Path) -> None:
    for file in directory.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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
    made.add_argument("--vocabulary", type=int, default=201_088)
    measured = commands.add_parser("measure")
    measured.add_argument("source", type=Path)
    measured.add_argument("target", type=Path)
    exported = commands.add_parser("measure-export")
    exported.add_argument("source", type=Path)
    exported.add_argument("target", type=Path)
    exported.add_argument("format", choices=["bf16", "fp32", "mxfp4"])
    exported.add_argument("--reference", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.directory, arguments.layers, arguments.experts, arguments.vocabulary)
    elif arguments.command == "measure-export":
        measure_export(arguments.source, arguments.target, arguments.format, arguments.reference)
    else:
        measure(arguments.source, arguments.target)


if __name__ == "__main__":
    main()
