"""MXFP4 on the CPU: a small C library, compiled on first use and kept in the cache directory.

The library only looks values up. Its tables are computed here, so that the arithmetic of MXFP4
exists once, in Python.
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
"""e2m1 values by code. Bit 3 of a code is the sign."""
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between adjacent magnitudes.

A tie rounds to the even code, so the 2nd, 4th and 6th midpoint round up.
"""
SCALES = 256
"""Values per scale byte."""
EXPONENT_BIAS = 127
"""Bias of the e8m0 scale: byte s is the factor 2 ** (s - 127)."""
SOURCE = Path(__file__).with_name("codec.c")
"""C source of the library."""


# Every table names its device: a caller may have set another default device, and C reads the
# tables from host memory.
def _exponents() -> Tensor:
    """Return the exponent of each scale, [256 scales, 1] int32."""
    return torch.arange(SCALES, dtype=torch.int32, device="cpu")[:, None] - EXPONENT_BIAS


def _value_table() -> Tensor:
    """Return value * 2 ** (scale - 127), [256 scales, 16 codes] bf16."""
    # torch.ldexp as in transformers, so that rounding at both ends of the range is the same.
    values = torch.tensor(VALUES, dtype=torch.bfloat16, device="cpu").expand(SCALES, 16)
    return torch.ldexp(values, _exponents()).to(torch.bfloat16)


def _pair_table(values: Tensor) -> Tensor:
    """Return the values of each byte, [256 scales, 256 bytes, 2] bf16: low nibble, high nibble.

    Args:
        values: [256 scales, 16 codes] bf16.
    """
    byte = torch.arange(256, device="cpu")
    return torch.stack((values[:, byte & 15], values[:, byte >> 4]), -1).contiguous()


def _limit_table() -> Tensor:
    """Return limits between codes, [256 scales, 8] bf16 bits as int16.

    Column j has the smallest magnitude whose code is above j. Column 7 is unused.
    """
    # Every scaled midpoint is exact in bf16 or exceeds its range; the smallest, 2 ** -129, is
    # subnormal. Comparing bits is therefore the same as rounding.
    midpoints = torch.tensor(MIDPOINTS, dtype=torch.float64, device="cpu").expand(SCALES, 7)
    bits = torch.ldexp(midpoints, _exponents()).to(torch.bfloat16).view(torch.int16).clone()

    # A tie rounds to the even code. For an even j the midpoint itself still has code j, so the
    # limit is the next bf16 number.
    bits[:, 0::2] += 1

    # A row of 8 has the width of a vector register, 16 bytes.
    limits = torch.full((SCALES, 8), 0x7FFF, dtype=torch.int16, device="cpu")
    limits[:, :7] = bits
    return limits


# Computed at import (1 ms, 0.3 MB), because Python imports a module only once, even with several
# threads. C reads these addresses in every call, so no table may be replaced and freed.
VALUE_TABLE = _value_table()
PAIR_TABLE = _pair_table(VALUE_TABLE)
LIMIT_TABLE = _limit_table()


def dequantize(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """Convert MXFP4 to bf16. The public function has checked the arguments; all are contiguous.

    Args:
        blocks: [..., n, 16] uint8.
        scales: [..., n] uint8.
        out: [..., n * 32] bf16. Receives the result.
    """
    _library().mxfp4_dequantize(blocks, scales, PAIR_TABLE, out, scales.numel())


def quantize(x: Tensor, scale_hint: Tensor | None, blocks: Tensor, scales: Tensor) -> None:
    """Convert bf16 to MXFP4. The public function has checked the arguments; all are contiguous.

    Args:
        x: [..., n * 32] bf16.
        scale_hint: [..., n] uint8, or None.
        blocks: [..., n, 16] uint8. Receives the codes.
        scales: [..., n] uint8. Receives the scales.

    Raises:
        ValueError: x contains NaN or Inf.
    """
    # C stops at the first block that is not finite and returns its index, else -1.
    bad_block = _library().mxfp4_quantize(
        x, scale_hint, LIMIT_TABLE, VALUE_TABLE, blocks, scales, scales.numel()
    )
    if bad_block >= 0:
        first = bad_block * 32
        raise ValueError(
            f"x contains NaN or Inf in block {bad_block} "
            f"(values {first} to {first + 31} in memory order)"
        )


class TensorPointer(ctypes.c_void_p):
    """ctypes argument type that accepts a tensor and passes a pointer to its data; None is NULL.

    A call holds its arguments until it returns, so the memory cannot be freed while C reads it. An
    address taken before the call would not keep the tensor alive.
    """

    @classmethod
    def from_param(cls, tensor: Any) -> Any:
        """Return the pointer to the first element of a tensor, or NULL."""
        if tensor is None:
            return None
        return ctypes.c_void_p(tensor.data_ptr())


# Without this lock, threads that call at the same time would each build: functools.cache has none.
_building = threading.Lock()


def _library() -> ctypes.CDLL:
    """Return the compiled library, the same object for all threads."""
    with _building:
        return _built_library()


@functools.cache
def _built_library() -> ctypes.CDLL:
    """Load the library from the cache directory; build it if it is missing."""
    compiler = os.environ.get("CC", "cc")
    # -march=native allows every vector instruction of this processor, so the processor is part of
    # the file's name.
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
    """Compile the library and move it to ``path``.

    Raises:
        RuntimeError: there is no compiler, or it fails. The message contains its output.
    """
    compiler = command[0]

    # Several processes may build at the same time. A rename is atomic, so none of them loads an
    # incomplete file. The folder is next to the target, because a rename needs one file system.
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
                f"MXFP4 on the CPU needs a C compiler: {compiler!r} not found. Install it or set CC"
            ) from None
        except subprocess.CalledProcessError as error:
            message = f"{compiler} could not build {SOURCE.name}:\n{error.stderr}"
            raise RuntimeError(message) from None
        built.rename(path)


def _processor() -> bytes:
    """Return a description of the processor: its model and instruction sets."""
    # A cache directory on a shared file system may serve machines with different processors. 40
    # lines contain the whole first core, and the other cores have the same flags.
    lines = Path("/proc/cpuinfo").read_text().splitlines()[:40]
    telling = [line for line in lines if line.startswith(("flags", "Features", "model"))]
    return "\n".join(telling).encode()
