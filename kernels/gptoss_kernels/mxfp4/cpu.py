"""The CPU path: a small C library, built with the system's compiler on first use.

The built library is kept in the cache directory. All tables that it works with are made here, so
that the arithmetic of MXFP4 is written once, in Python.
"""

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
from torch import Tensor

from gptoss_kernels.cache import cache_directory

logger = logging.getLogger(__name__)

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""e2m1 by code; bit 3 is the sign."""
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between neighbouring magnitudes. A tie goes to the even code: up at the 2nd, 4th and 6th."""
SCALES = 256
EXPONENT_BIAS = 127
"""Of a scale: it stands for 2 ** (scale - 127)."""
SOURCE = Path(__file__).with_name("codec.c")


def _exponents() -> Tensor:
    """Return [256 scales, 1] int32: the power of two that each scale stands for."""
    return torch.arange(SCALES, dtype=torch.int32, device="cpu")[:, None] - EXPONENT_BIAS


def _value_table() -> Tensor:
    """Make [256 scales, 16 codes] bf16: value * 2 ** (scale - 127), as torch.ldexp rounds it."""
    values = torch.tensor(VALUES, dtype=torch.bfloat16, device="cpu").expand(SCALES, 16)
    return torch.ldexp(values, _exponents()).to(torch.bfloat16)


def _pair_table(values: Tensor) -> Tensor:
    """Make [256 scales, 256 bytes, 2] bf16 from the value table: low nibble, high nibble."""
    byte = torch.arange(256, device="cpu")
    return torch.stack((values[:, byte & 15], values[:, byte >> 4]), -1).contiguous()


def _limit_table() -> Tensor:
    """Make [256 scales, 8] int16 as bf16 bits: the least magnitude whose code is above j.

    Column 7 is unused. Every midpoint times a scale is a bf16 number (the least, 2 ** -129, is a
    subnormal) or beyond the largest one.
    """
    midpoints = torch.tensor(MIDPOINTS, dtype=torch.float64, device="cpu").expand(SCALES, 7)
    bits = torch.ldexp(midpoints, _exponents()).to(torch.bfloat16).view(torch.int16).clone()

    # A tie goes to the even code: for an even j the midpoint itself still has code j, and the
    # limit is the next number.
    bits[:, 0::2] += 1

    limits = torch.full((SCALES, 8), 0x7FFF, dtype=torch.int16, device="cpu")
    limits[:, :7] = bits
    return limits


# Made while the module is imported, which happens once whatever the threads: C reads these tables
# through their addresses, so there must never be a second copy that can be freed. They take 0.3 MB
# and 1 ms.
VALUE_TABLE = _value_table()
PAIR_TABLE = _pair_table(VALUE_TABLE)
LIMIT_TABLE = _limit_table()


def dequantize(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """Convert MXFP4 to bf16; contiguous tensors as checked by the public function."""
    _library().mxfp4_dequantize(blocks, scales, PAIR_TABLE, out, scales.numel())


def quantize(x: Tensor, scale_hint: Tensor | None, blocks: Tensor, scales: Tensor) -> None:
    """Convert bf16 to MXFP4; contiguous tensors as checked by the public function.

    Raises:
        ValueError: when x holds NaN or Inf.
    """
    bad_block = _library().mxfp4_quantize(
        x, scale_hint, LIMIT_TABLE, VALUE_TABLE, blocks, scales, scales.numel()
    )
    if bad_block >= 0:
        first = bad_block * 32
        raise ValueError(
            f"x holds NaN or Inf in block {bad_block} (values {first} to {first + 31} in memory order)"
        )


class TensorPointer(ctypes.c_void_p):
    """The ctypes argument type of a pointer to a tensor's data; functions take the tensor itself.

    None is NULL. Whoever calls a C function holds its arguments until it returns, so that the
    memory cannot be freed while C reads it. An address taken before the call would not keep its
    tensor alive.
    """

    @classmethod
    def from_param(cls, tensor: Any) -> Any:
        """Return the pointer to a tensor's first element, or NULL."""
        if tensor is None:
            return None
        return ctypes.c_void_p(tensor.data_ptr())


_building = threading.Lock()


def _library() -> ctypes.CDLL:
    """Return the compiled codec; threads that ask at once get the same one."""
    with _building:
        return _built_library()


@functools.cache
def _built_library() -> ctypes.CDLL:
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-std=c11"]
    inputs = SOURCE.read_bytes() + " ".join(command).encode() + _processor()
    digest = hashlib.sha256(inputs).hexdigest()[:16]

    path = cache_directory() / f"mxfp4_{digest}.so"
    if not path.exists():
        _build(command, path)
        logger.info("built %s", path)

    library = ctypes.CDLL(str(path))
    library.mxfp4_dequantize.argtypes = [TensorPointer] * 4 + [ctypes.c_size_t]
    library.mxfp4_dequantize.restype = None
    library.mxfp4_quantize.argtypes = [TensorPointer] * 6 + [ctypes.c_size_t]
    library.mxfp4_quantize.restype = ctypes.c_ssize_t
    return library


def _build(command: list[str], path: Path) -> None:
    """Compile the codec to ``path``, which appears whole: other processes may build it, too.

    Raises:
        RuntimeError: without a compiler, or with its message.
    """
    compiler = command[0]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        try:
            subprocess.run(
                [*command, str(SOURCE), "-o", str(built)],
                check=True,
                capture_output=True,
                text=True,
            )
        except FileNotFoundError:
            raise RuntimeError(
                f"MXFP4 on the CPU needs a C compiler: {compiler!r} not found, set CC"
            ) from None
        except subprocess.CalledProcessError as error:
            message = f"{compiler} could not build {SOURCE.name}:\n{error.stderr}"
            raise RuntimeError(message) from None
        built.rename(path)


def _processor() -> bytes:
    """Return what -march=native depends on: a shared cache may serve different machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()[:40]
    telling = [line for line in lines if line.startswith(("flags", "Features", "model"))]
    return "\n".join(telling).encode()
