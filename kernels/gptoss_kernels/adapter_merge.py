"""Low-rank updates merged into frozen bf16 or MXFP4 weights, in one pass over a GPU's memory.

    out = bf16(W + s (B A)),  B A summed up rank by rank in fp32

The bits are those of the same sum on a CPU. ``adapter_merge.cu`` says how, and what a thread owns.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from gptoss_kernels import nvrtc
from gptoss_kernels.mxfp4.api import BLOCK

SOURCE = Path(__file__).with_name("adapter_merge.cu")
FEW_RANKS = 16
"""Up to which a thread takes few rows, so that more threads are there to wait for memory."""
ROWS_OF_FEW_RANKS = 2
ROWS = 4
"""Rows of a weight that a thread takes beyond: what it reads of A serves so many."""
COLUMNS = 8
"""Columns that a thread takes, 16 bytes: COLUMNS of the source."""
RANKS = 8
"""Of which B brings so many at a time: RANKS of the source."""
THREADS = 128
"""Of a block."""
ALIGNMENT = 16
"""Bytes that a thread reads at once."""
KERNEL_NAME = "merge_adapters"
"""In the source, and in profiles."""


def merge_dense(weight: Tensor, a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """Merge updates into bf16 weights.

    Args:
        weight: [..., out, in] bf16, ``in`` a multiple of 8.
        a: [..., rank, in] bf16.
        b: [..., out, rank] bf16.
        scale: of the updates.
        out: [..., out, in] bf16, contiguous, to write into.

    Raises:
        ValueError: naming the argument whose dtype, shape or device does not fit.
    """
    _check_update(a, b, out)
    _check("weight", weight, out.shape, torch.bfloat16, out.device)
    _launch(weight, None, a, b, scale, out)


def merge_packed(
    blocks: Tensor, scales: Tensor, a: Tensor, b: Tensor, scale: float, out: Tensor
) -> None:
    """Dequantise MXFP4 weights and merge updates into them.

    Args:
        blocks: [..., out, in / 32, 16] uint8, as ``mxfp4.dequantize`` takes them.
        scales: [..., out, in / 32] uint8.
        a: [..., rank, in] bf16.
        b: [..., out, rank] bf16.
        scale: of the updates.
        out: [..., out, in] bf16, contiguous, to write into.

    Raises:
        ValueError: naming the argument whose dtype, shape or device does not fit.
    """
    _check_update(a, b, out)
    shape = torch.Size((*out.shape[:-1], out.shape[-1] // BLOCK))
    _check("scales", scales, shape, torch.uint8, out.device)
    _check("blocks", blocks, torch.Size((*shape, BLOCK // 2)), torch.uint8, out.device)
    _launch(blocks, scales, a, b, scale, out)


def _launch(
    base: Tensor, scales: Tensor | None, a: Tensor, b: Tensor, scale: float, out: Tensor
) -> None:
    """Run the kernel on checked arguments; ``scales`` is None for a dense base."""
    if out.numel() == 0:
        return

    defines = macros(is_packed=scales is not None, rank=a.shape[-2])
    with torch.cuda.device(out.device):
        kernel = _kernel(defines["PACKED"], defines["ROWS"], nvrtc.architecture(out.device))
        kernel(*launch_arguments(base, scales, a, b, scale, out))


def launch_arguments(
    base: Tensor, scales: Tensor | None, a: Tensor, b: Tensor, scale: float, out: Tensor
) -> tuple[int, int, Tensor, Tensor, Tensor, Tensor, Tensor, float, int, int, int, int]:
    """Return blocks, threads of a block, and the kernel's arguments in the source's order."""
    rank = a.shape[-2]
    rows, columns = out.shape[-2:]
    experts = out.numel() // (rows * columns)
    groups = columns // COLUMNS

    # A rank of zeros changes no sum.
    missing_ranks = -rank % RANKS
    whole_a = pad(a, (0, 0, 0, missing_ranks))
    whole_b = pad(b, (0, missing_ranks))

    threads = experts * -(-rows // rows_of_a_thread(rank)) * groups
    base = _readable(base)
    return (
        -(-threads // THREADS),
        THREADS,
        base,
        # Not read of a dense base, but it must be a pointer.
        base if scales is None else scales.contiguous(),
        _readable(whole_a),
        _readable(whole_b),
        out,
        scale,
        experts,
        rows,
        groups,
        rank + missing_ranks,
    )


def _readable(tensor: Tensor) -> Tensor:
    """Return the values in one piece that begins where 16 bytes can be read at once."""
    tensor = tensor.contiguous()
    if tensor.data_ptr() % ALIGNMENT:
        return tensor.clone()
    return tensor


@functools.cache
def _kernel(packed: int, rows: int, architecture: str) -> nvrtc.Kernel:
    """Compile and load the kernel with these macros."""
    cubin = nvrtc.compile_cubin(SOURCE, {"PACKED": packed, "ROWS": rows}, architecture)
    return nvrtc.Kernel(cubin, KERNEL_NAME, shared_bytes=0)


def macros(*, is_packed: bool, rank: int) -> dict[str, int]:
    """Return what the source is compiled with."""
    return {"PACKED": int(is_packed), "ROWS": rows_of_a_thread(rank)}


def rows_of_a_thread(rank: int) -> int:
    """Return how many rows a thread takes of updates of this rank."""
    if rank <= FEW_RANKS:
        return ROWS_OF_FEW_RANKS
    return ROWS


def _check_update(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Refuse factors and a result that do not belong together."""
    is_placed = out.is_contiguous() and out.data_ptr() % ALIGNMENT == 0
    if out.dtype != torch.bfloat16 or not is_placed or out.shape[-1] % COLUMNS:
        raise ValueError(
            f"out must be a contiguous bf16 tensor of rows of a multiple of {COLUMNS} columns, at an address that is "
            f"a multiple of {ALIGNMENT}, got {out.dtype} {list(out.shape)}"
        )
    rank = a.shape[-2]
    batch = out.shape[:-2]
    rows, columns = out.shape[-2:]
    _check("a", a, torch.Size((*batch, rank, columns)), torch.bfloat16, out.device)
    _check("b", b, torch.Size((*batch, rows, rank)), torch.bfloat16, out.device)


def _check(
    name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device:
        raise ValueError(
            f"{name} must be {dtype} {list(shape)} on {device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
