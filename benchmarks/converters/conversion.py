"""Full-size conversion on a small machine, with a synthetic MXFP4 checkpoint.

    python -m benchmarks.converters make DIRECTORY
        [--layers 24] [--experts 32] [--vocabulary 201088]
    python -m benchmarks.converters measure HF_DIRECTORY MEGATRON_DIRECTORY
    python -m benchmarks.converters measure-export MEGATRON_DIRECTORY NEW_HF_DIRECTORY FORMAT
        [--reference HF_DIRECTORY]

Needs no GPU.

- ``make`` writes the checkpoint. With fewer than 24 layers, the experts are a smaller fraction of
  the model than in the 20B. A smaller ``--vocabulary`` restores the fraction.
- ``measure`` times an import in a separate process. It drops the source from the page cache and
  compares the import with the speed of the disk, for which it writes 4 GB. It needs free space of
  three times the source. The imported checkpoint is kept.
- ``measure-export`` times an export.

Both measurements print how much time the check of a sample (reading back) added, also as a
fraction of the remaining time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from converters.hf_directory import write_hf_directory, written_shapes
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig

PROBE_BYTES = 4_000_000_000
"""Size of the disk probe: far more than a disk's own cache holds."""


def synthetic_tensors(config: GptOssModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random codes, scales of 2**-9 to 2**-6 and normal weights, by stored name.

    Random values are drawn once. Every tensor starts at a different offset of them.
    """
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (1 << 25,), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 122, (1 << 22,), dtype=torch.uint8, generator=generator)
    weights = (torch.randn(1 << 22, generator=generator) * 0.02).bfloat16()

    for number, (name, shape) in enumerate(written_shapes(config, quantized=True).items()):
        if name.endswith("_blocks"):
            drawn = codes
        elif name.endswith("_scales"):
            drawn = scales
        else:
            drawn = weights

        count = math.prod(shape)
        repeats = math.ceil(count / drawn.numel())
        yield name, drawn.roll(number * 7919).repeat(repeats)[:count].view(shape)


def make(directory: Path, layers: int, experts: int, vocabulary: int) -> None:
    """Write a synthetic model with the widths of the 20B."""
    config = GptOssModelConfig(num_layers=layers, num_experts=experts, vocab_size=vocabulary)
    write_hf_directory(directory, config, synthetic_tensors(config), quantized=True)
    print(f"{directory}: {directory_bytes(directory) / 1e9:.2f} GB")


def measure_import(source: Path, target: Path) -> None:
    """Time an import and print its speed next to the speed of the disk."""
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    disk_before = write_speed(target.parent)
    print(f"disk: {disk_before / 1e9:.3f} GB/s")

    drop_from_cache(source)
    timing = convert("import_checkpoint(*paths)", [source, target])
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"load average {os.getloadavg()[0]:.1f}")
    disk_after = write_speed(target.parent)

    written = directory_bytes(target)
    speed = written / timing.seconds
    mean_disk_speed = (disk_before + disk_after) / 2
    print(
        f"import: {directory_bytes(source) / 1e9:.2f} GB -> {written / 1e9:.2f} GB in "
        f"{timing.seconds:.1f} s, {speed / 1e9:.3f} GB/s written; "
        f"{usage.ru_utime + usage.ru_stime:.0f} s of CPU; "
        f"peak resident {usage.ru_maxrss / 1e6:.2f} GB"
    )
    print(
        f"disk: {disk_before / 1e9:.3f} GB/s before, {disk_after / 1e9:.3f} GB/s after; "
        f"import at {speed / mean_disk_speed:.0%} of their mean"
    )
    print_cost(timing)


def measure_export(source: Path, target: Path, precision: str, reference: Path | None) -> None:
    """Time an export and print the result.

    Args:
        source: Megatron checkpoint.
        target: new Hugging Face directory.
        precision: format of the export.
        reference: Hugging Face directory with tokenizer and settings; None for the source's.
    """
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    drop_from_cache(source)
    paths = [source, target]
    if reference is not None:
        paths.append(reference)
    timing = convert(
        f"export_checkpoint(*paths[:2], {precision!r}, *paths[2:]).read_back",
        paths,
    )
    print(
        f"export to {precision}: {directory_bytes(source) / 1e9:.2f} GB -> "
        f"{directory_bytes(target) / 1e9:.2f} GB in {timing.seconds:.1f} s"
    )
    print_cost(timing)


@dataclass(frozen=True)
class Timing:
    """Seconds of one conversion."""

    seconds: float
    added: float
    """Part of ``seconds`` that reading back added."""


def convert(expression: str, paths: list[Path]) -> Timing:
    """Run a conversion in a separate process.

    Args:
        expression: Python expression with the variable ``paths``. Its value is a ``ReadBackResult``.
        paths: directories of the conversion.
    """
    code = (
        "import json, sys\n"
        "from converters.torch_dist import export_checkpoint, import_checkpoint\n"
        "paths = sys.argv[1:]\n"
        f"result = {expression}\n"
        "print(json.dumps([result.added_seconds, str(result)]))\n"
    )
    began = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - began

    added, sentence = json.loads(process.stdout.splitlines()[-1])
    print(sentence)
    return Timing(seconds, added)


def print_cost(timing: Timing) -> None:
    """Print the time that reading back added."""
    rest = timing.seconds - timing.added
    print(
        f"reading back added {timing.added:.1f} s, {timing.added / rest:.1%} of the other {rest:.1f} s"
    )


def drop_from_cache(directory: Path) -> None:
    """Drop a directory from the page cache, so that its next reader reads from the disk."""
    for path in directory.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # dirty pages are not dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_speed(directory: Path) -> float:
    """Measure bytes per second of one sequential write, including ``fsync``."""
    path = directory / "write_speed_probe"
    block = os.urandom(1 << 26)
    blocks = PROBE_BYTES // len(block)
    os.sync()  # finish earlier writes first

    began = time.perf_counter()
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(blocks):
                file.write(block)
            os.fsync(file.fileno())
        return blocks * len(block) / (time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)


def directory_bytes(directory: Path) -> int:
    """Sum the sizes of a directory's files."""
    return sum(path.stat().st_size for path in directory.iterdir())


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    make_command = commands.add_parser("make")
    make_command.add_argument("directory", type=Path)
    make_command.add_argument("--layers", type=int, default=24)
    make_command.add_argument("--experts", type=int, default=32)
    make_command.add_argument("--vocabulary", type=int, default=201_088)

    import_command = commands.add_parser("measure")
    import_command.add_argument("source", type=Path)
    import_command.add_argument("target", type=Path)

    export_command = commands.add_parser("measure-export")
    export_command.add_argument("source", type=Path)
    export_command.add_argument("target", type=Path)
    export_command.add_argument("format", choices=["bf16", "fp32", "mxfp4"])
    export_command.add_argument("--reference", type=Path)
    return parser.parse_args()


def main() -> None:
    """Run the command that the user chose."""
    arguments = parse_arguments()
    if arguments.command == "make":
        make(arguments.directory, arguments.layers, arguments.experts, arguments.vocabulary)
    elif arguments.command == "measure":
        measure_import(arguments.source, arguments.target)
    else:
        measure_export(
            arguments.source,
            arguments.target,
            precision=arguments.format,
            reference=arguments.reference,
        )
