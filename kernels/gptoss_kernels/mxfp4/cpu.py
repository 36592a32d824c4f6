"""The CPU path: a small C library, built with the system's compiler on first use and kept in the cache directory."""

import ctypes
import functools
import hashlib
import logging
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from gptoss_kernels.cache import cache_directory

logger = logging.getLogger(__name__)

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""e2m1 by code; bit 3 is the sign."""
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between neighbouring magnitudes. A tie goes to the even code: up at the second, fourth and sixth."""
SOURCE = Path(__file__).with_name("codec.c")


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Contiguous tensors as checked by the public function."""
    _library().mxfp4_dequantize(*_pointers(blocks, scales, pair_table(), out), scales.numel())


def quantize(x: torch.Tensor, scale_hint: torch.Tensor | None, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Contiguous tensors as checked by the public function. Raises ValueError when x holds NaN or Inf."""
    given = _pointers(x, scale_hint, limit_table(), value_table(), blocks, scales)
    bad = _library().mxfp4_quantize(*given, scales.numel())
    if bad >= 0:
        raise ValueError(f"x holds NaN or Inf in block {bad} (values {bad * 32} to {bad * 32 + 31} in memory order)")


def _pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@functools.cache
def value_table() -> torch.Tensor:
    """[256 scales, 16 codes] bf16: value * 2 ** (scale - 127), as torch.ldexp rounds it."""
    exponents = torch.arange(256, dtype=torch.int32)[:, None] - 127
    return torch.ldexp(torch.tensor(VALUES, dtype=torch.bfloat16).expand(256, 16), exponents).to(torch.bfloat16)


@functools.cache
def pair_table() -> torch.Tensor:
    """[256 scales, 256 bytes, 2] bf16: low nibble, high nibble."""
    byte = torch.arange(256)
    table = value_table()
    return torch.stack((table[:, byte & 15], table[:, byte >> 4]), -1).contiguous()


@functools.cache
def limit_table() -> torch.Tensor:
    """[256 scales, 8] int16 holding unsigned bf16 bits: least magnitude whose code is above j; column 7 is unused.

    Every midpoint times a scale is a bf16 number (the least, 2 ** -129, is a subnormal) or beyond the largest one."""
    exponents = torch.arange(256, dtype=torch.int32)[:, None] - 127
    midpoints = torch.ldexp(torch.tensor(MIDPOINTS, dtype=torch.float64).expand(256, 7), exponents)
    bits = midpoints.to(torch.bfloat16).view(torch.int16).clone()
    bits[:, 0::2] += 1
    limits = torch.full((256, 8), 0x7FFF, dtype=torch.int16)
    limits[:, :7] = bits
    return limits


@functools.cache
def _library() -> ctypes.CDLL:
    source = SOURCE.read_bytes()
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-std=c11"]
    digest = hashlib.sha256(source + " ".join(command).encode() + _processor()).hexdigest()[:16]
    path = cache_directory() / f"mxfp4_{digest}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            try:
                subprocess.run([*command, str(SOURCE), "-o", str(built)], check=True, capture_output=True, text=True)
            except FileNotFoundError:
                raise RuntimeError(f"MXFP4 on the CPU needs a C compiler: {compiler!r} not found, set CC") from None
            except subprocess.CalledProcessError as error:
                raise RuntimeError(f"{compiler} could not build {SOURCE.name}:\n{error.stderr}") from None
            built.rename(path)
        logger.info("built %s", path)
    library = ctypes.CDLL(str(path))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.mxfp4_dequantize.argtypes = [pointer] * 4 + [size]
    library.mxfp4_dequantize.restype = None
    library.mxfp4_quantize.argtypes = [pointer] * 6 + [size]
    library.mxfp4_quantize.restype = ctypes.c_ssize_t
    return library


def _processor() -> bytes:
    """What -march=native depends on: a cache on a shared disk may serve different machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()[:40]
    return "\n".join(line for line in lines if line.startswith(("flags", "Features", "model"))).encode()
