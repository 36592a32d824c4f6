"""The CPU path: a small C library, built with the system's compiler on first use and kept in the cache directory."""

import ctypes
import functools
import hashlib
import logging
import os
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from gptoss_kernels.cache import cache_directory

logger = logging.getLogger(__name__)

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""e2m1 by code; bit 3 is the sign."""
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between neighbouring magnitudes. A tie goes to the even code: up at the second, fourth and sixth."""
SOURCE = Path(__file__).with_name("codec.c")


def _value_table() -> torch.Tensor:
    """[256 scales, 16 codes] bf16: value * 2 ** (scale - 127), as torch.ldexp rounds it."""
    exponents = torch.arange(256, dtype=torch.int32, device="cpu")[:, None] - 127
    values = torch.tensor(VALUES, dtype=torch.bfloat16, device="cpu").expand(256, 16)
    return torch.ldexp(values, exponents).to(torch.bfloat16)


def _pair_table(values: torch.Tensor) -> torch.Tensor:
    """[256 scales, 256 bytes, 2] bf16 from the value table: low nibble, high nibble."""
    byte = torch.arange(256, device="cpu")
    return torch.stack((values[:, byte & 15], values[:, byte >> 4]), -1).contiguous()


def _limit_table() -> torch.Tensor:
    """[256 scales, 8] int16 holding unsigned bf16 bits: least magnitude whose code is above j; column 7 is unused.

    Every midpoint times a scale is a bf16 number (the least, 2 ** -129, is a subnormal) or beyond the largest one."""
    exponents = torch.arange(256, dtype=torch.int32, device="cpu")[:, None] - 127
    midpoints = torch.tensor(MIDPOINTS, dtype=torch.float64, device="cpu").expand(256, 7)
    bits = torch.ldexp(midpoints, exponents).to(torch.bfloat16).view(torch.int16).clone()

    # A tie goes to the even code: for an even j the midpoint itself still has code j, and the limit is the next number.
    bits[:, 0::2] += 1

    limits = torch.full((256, 8), 0x7FFF, dtype=torch.int16, device="cpu")
    limits[:, :7] = bits
    return limits


# Made while the module is imported, which happens once whatever the threads: C reads these tables through their
# addresses, so there must never be a second copy that can be freed. They take 0.3 MB and 1 ms.
VALUE_TABLE = _value_table()
PAIR_TABLE = _pair_table(VALUE_TABLE)
LIMIT_TABLE = _limit_table()


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Contiguous tensors as checked by the public function."""
    _library().mxfp4_dequantize(blocks, scales, PAIR_TABLE, out, scales.numel())


def quantize(x: torch.Tensor, scale_hint: torch.Tensor | None, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Contiguous tensors as checked by the public function. Raises ValueError when x holds NaN or Inf."""
    bad = _library().mxfp4_quantize(x, scale_hint, LIMIT_TABLE, VALUE_TABLE, blocks, scales, scales.numel())
    if bad >= 0:
        raise ValueError(f"x holds NaN or Inf in block {bad} (values {bad * 32} to {bad * 32 + 31} in memory order)")


class TensorPointer(ctypes.c_void_p):
    """The ctypes argument type of a pointer to a tensor's data: functions take the tensor itself, or None for NULL.

    Whoever calls a C function holds its arguments until it returns, so that the memory cannot be freed while C reads
    it. An address taken before the call would not keep its tensor alive."""

    @classmethod
    def from_param(cls, tensor: Any) -> Any:
        """The pointer to a tensor's first element, or NULL."""
        return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


_building = threading.Lock()


def _library() -> ctypes.CDLL:
    """The compiled codec; threads that ask at once get the same one."""
    with _building:
        return _built_library()


@functools.cache
def _built_library() -> ctypes.CDLL:
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
    library.mxfp4_dequantize.argtypes = [TensorPointer] * 4 + [ctypes.c_size_t]
    library.mxfp4_dequantize.restype = None
    library.mxfp4_quantize.argtypes = [TensorPointer] * 6 + [ctypes.c_size_t]
    library.mxfp4_quantize.restype = ctypes.c_ssize_t
    return library


def _processor() -> bytes:
    """What -march=native depends on: a cache on a shared disk may serve different machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()[:40]
    return "\n".join(line for line in lines if line.startswith(("flags", "Features", "model"))).encode()
