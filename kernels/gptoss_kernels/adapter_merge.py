"""Merge of low-rank updates into frozen bf16 or MXFP4 weights, in one pass over GPU memory.

    out = bf16(W + s (B A)),  B A accumulated rank by rank in fp32

The result equals the CPU's bit for bit. The comment at the top of ``adapter_merge.cu`` describes
the rounding and the work of each thread.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from gptoss_kernels import nvrtc
from gptoss_kernels.mxfp4.api import BLOCK

SOURCE = Path(__file__).with_name("adapter_merge.cu")
"""CUDA source of the kernel."""
# A small rank leaves little arithmetic per loaded byte. Fewer rows per thread then give more
# threads, and more loads in flight hide the memory's latency.
SMALL_RANK = 16
"""Largest rank for which a thread computes ROWS_FOR_SMALL_RANK rows instead of ROWS."""
ROWS_FOR_SMALL_RANK = 2
"""Weight rows per thread for ranks up to SMALL_RANK."""
ROWS = 4
"""Weight rows per thread for larger ranks. A thread reads A once for all of its rows."""
COLUMNS = 8
"""Weight columns per thread: 16 bytes of bf16. Equals COLUMNS in the source."""
RANKS = 8
"""Ranks of B per load. Equals RANKS in the source."""
THREADS = 128
"""Threads per block."""
ALIGNMENT = 16
"""Bytes per load, and the alignment that such a load needs."""
KERNEL_NAME = "merge_adapters"
"""Name of the kernel in the source and in profiles."""


def merge_dense(weight: Tensor, a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """Merge updates into bf16 weights.

    Args:
        weight: [..., out, in] bf16, ``in`` a multiple of 8.
        a: [..., rank, in] bf16 factor A.
        b: [..., out, rank] bf16 factor B.
        scale: factor of the updates.
        out: [..., out, in] bf16, contiguous. Receives the merged weights.

    Raises:
        ValueError: an argument has a wrong dtype, shape or device. The message names it.
    """
    _check_update(a, b, out)
    _check("weight", weight, out.shape, torch.bfloat16, out.device)
    _launch(weight, None, a, b, scale, out)


def merge_mxfp4(
    blocks: Tensor, scales: Tensor, a: Tensor, b: Tensor, scale: float, out: Tensor
) -> None:
    """Dequantize MXFP4 weights and merge updates into them.

    Args:
        blocks: [..., out, in / 32, 16] uint8, in the layout of ``mxfp4.dequantize``.
        scales: [..., out, in / 32] uint8.
        a: [..., rank, in] bf16 factor A.
        b: [..., out, rank] bf16 factor B.
        scale: factor of the updates.
        out: [..., out, in] bf16, contiguous. Receives the merged weights.

    Raises:
        ValueError: an argument has a wrong dtype, shape or device. The message names it.
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
    # CUDA rejects a launch of 0 blocks.
    if out.numel() == 0:
        return

    defines = macros(is_mxfp4=scales is not None, rank=a.shape[-2])
    with torch.cuda.device(out.device):
        kernel = _kernel(defines["MXFP4"], defines["ROWS"], nvrtc.architecture(out.device))
        kernel(*launch_arguments(base, scales, a, b, scale, out))


def launch_arguments(
    base: Tensor, scales: Tensor | None, a: Tensor, b: Tensor, scale: float, out: Tensor
) -> tuple[int, int, Tensor, Tensor, Tensor, Tensor, Tensor, float, int, int, int, int]:
    """Return the grid and the arguments of a launch, in the order of the source.

    Args:
        base: [..., out, in] bf16, or [..., out, in / 32, 16] uint8 blocks.
        scales: [..., out, in / 32] uint8; None for a bf16 base.
        a: [..., rank, in] bf16.
        b: [..., out, rank] bf16.
        scale: factor of the updates.
        out: [..., out, in] bf16.

    Returns:
        Number of blocks, threads per block, then the arguments of the kernel.
    """
    rank = a.shape[-2]
    rows, columns = out.shape[-2:]
    experts = out.numel() // (rows * columns)
    groups = columns // COLUMNS

    # The kernel loads RANKS ranks of B at a time. Padding with zeros changes no sum.
    missing_ranks = -rank % RANKS
    whole_a = pad(a, (0, 0, 0, missing_ranks))
    whole_b = pad(b, (0, missing_ranks))

    threads = experts * -(-rows // rows_per_thread(rank)) * groups
    base = _aligned(base)
    return (
        -(-threads // THREADS),
        THREADS,
        base,
        # The kernel does not read the scales of a dense base, but needs a valid pointer.
        base if scales is None else scales.contiguous(),
        _aligned(whole_a),
        _aligned(whole_b),
        out,
        scale,
        experts,
        rows,
        groups,
        rank + missing_ranks,
    )


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor as contiguous memory that starts at a multiple of ALIGNMENT bytes."""
    tensor = tensor.contiguous()
    # A view into a larger tensor can be contiguous and misaligned. A clone is always aligned.
    if tensor.data_ptr() % ALIGNMENT:
        return tensor.clone()
    return tensor


@functools.cache
def _kernel(mxfp4: int, rows: int, architecture: str) -> nvrtc.CudaKernel:
    """Return the kernel compiled with these macros, loaded once per process."""
    cubin = nvrtc.compile_cubin(SOURCE, {"MXFP4": mxfp4, "ROWS": rows}, architecture)
    return nvrtc.CudaKernel(cubin, KERNEL_NAME, shared_bytes=0)


def macros(*, is_mxfp4: bool, rank: int) -> dict[str, int]:
    """Return the macros for compiling the source.

    Args:
        is_mxfp4: True for an MXFP4 base, False for bf16.
        rank: rank of the updates before padding.
    """
    return {"MXFP4": int(is_mxfp4), "ROWS": rows_per_thread(rank)}


def rows_per_thread(rank: int) -> int:
    """Return the number of weight rows per thread for updates of this rank."""
    if rank <= SMALL_RANK:
        return ROWS_FOR_SMALL_RANK
    return ROWS


def _check_update(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Raise ValueError if the factors and the result do not fit together."""
    # The kernel writes 16 bytes at a time and never a part of them.
    is_placed = out.is_contiguous() and out.data_ptr() % ALIGNMENT == 0
    if out.dtype != torch.bfloat16 or not is_placed or out.shape[-1] % COLUMNS:
        raise ValueError(
            f"out must be a contiguous bf16 tensor with a multiple of {COLUMNS} columns, at an "
            f"address that is a multiple of {ALIGNMENT}, got {out.dtype} {list(out.shape)}"
        )
    rank = a.shape[-2]
    batch = out.shape[:-2]
    rows, columns = out.shape[-2:]
    _check("a", a, torch.Size((*batch, rank, columns)), torch.bfloat16, out.device)
    _check("b", b, torch.Size((*batch, rows, rank)), torch.bfloat16, out.device)


def _check(
    name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError if a tensor has a different dtype, shape or device."""
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device:
        raise ValueError(
            f"{name} must be {dtype} {list(shape)} on {device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
