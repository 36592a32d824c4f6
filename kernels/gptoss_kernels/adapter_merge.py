"""Low-rank updates merged into frozen bf16 or MXFP4 weights, in one pass over a GPU's memory.

    out = bf16(W + s (B A)),  B A summed up rank by rank in fp32

Every multiplication and every addition is rounded by itself, so that the bits are those of the
same sum on a CPU. Left alone, Triton would make a fused multiply-add, which rounds once, of any pair:
the kernel is launched with ``enable_fp_fusion=False``, which keeps both LLVM and ptxas from it. In
the sum over ranks it does so itself, at half the cost: the product of two bf16 numbers has 16 bits
and is exact in fp32, so that there is nothing to round but the sum. (Products below 2^-133 are not
exact. They would be seen only next to a weight of 0 and no larger product.)
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptoss_kernels.mxfp4.api import BLOCK
from gptoss_kernels.mxfp4.gpu import decode_magnitude

ROWS = 32
"""Rows of a weight that a program takes."""
WORDS = 64
"""Pairs of columns that a program takes."""

# Grid: pairs of columns, rows, experts. All of a program's work is on words of 32 bits that hold two
# bf16 values of one row, the even column in the low half: A, the result and a dense base are read and
# written as such, and of a packed base a byte holds the same two columns. So even and odd columns
# have accumulators of their own, and no value moves between threads.


@triton.jit
def _merge_kernel(
    base,
    scales,
    a,
    b,
    out,
    update_scale,
    rows,
    words,
    PACKED: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    row_inside = row < rows
    word_inside = word < words
    inside = row_inside[:, None] & word_inside[None, :]
    row_of_all = expert * rows + row
    place = row_of_all[:, None] * words + word[None, :]

    if PACKED:
        # 16 bytes share a scale: 2^(scale - 127) as fp32 bits; scale 0 is the subnormal 2^-127
        byte = tl.load(base + place, mask=inside, other=0).to(tl.int32)
        block = row_of_all[:, None] * (words // 16) + (word // 16)[None, :]
        scale = tl.load(scales + block, mask=inside, other=127).to(tl.int32)
        exponent_bits = tl.where(scale == 0, 0x00400000, scale << 23)
        even = _decode(byte & 15, exponent_bits)
        odd = _decode(byte >> 4, exponent_bits)
    else:
        pair = tl.load(base + place, mask=inside, other=0)
        even = _low_half(pair)
        odd = _high_half(pair)

    even_update = tl.zeros([ROWS, WORDS], tl.float32)
    odd_update = tl.zeros([ROWS, WORDS], tl.float32)
    for i in range(RANK):
        pair_of_a = tl.load(a + (expert * RANK + i) * words + word, mask=word_inside, other=0)
        column_of_b = tl.load(b + row_of_all * RANK + i, mask=row_inside, other=0.0)
        value_of_b = column_of_b.to(tl.float32)[:, None]
        even_update = tl.fma(value_of_b, _low_half(pair_of_a)[None, :], even_update)
        odd_update = tl.fma(value_of_b, _high_half(pair_of_a)[None, :], odd_update)
    even_update = even_update * update_scale
    odd_update = odd_update * update_scale

    # Adding a zero would turn a negative zero of the base into a positive one.
    even = tl.where(even_update == 0, even, even + even_update)
    odd = tl.where(odd_update == 0, odd, odd + odd_update)
    merged = (_bf16_bits(even) & 0xFFFF) | (_bf16_bits(odd) << 16)
    tl.store(out + place, merged, mask=inside)


@triton.jit
def _decode(code, exponent_bits):
    """Turn an e2m1 code, with its scale as fp32 bits, into fp32."""
    bits = decode_magnitude(code, exponent_bits).to(tl.int32, bitcast=True)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _low_half(pair):
    """Turn the bf16 value in the low half of a word into fp32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high_half(pair):
    """Turn the bf16 value in the high half of a word into fp32."""
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _bf16_bits(value):
    """Round fp32 to the nearest bf16, ties to even; its bits are the low half of the result."""
    # Written out, because Triton's interpreter, which the CPU tests run, would cut off.
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(value != value, 0x7FC00000, bits)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def merge_dense(weight: Tensor, a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """Merge updates into bf16 weights.

    Args:
        weight: [..., out, in] bf16, ``in`` even.
        a: [..., rank, in] bf16.
        b: [..., out, rank] bf16.
        scale: of the updates.
        out: [..., out, in] bf16, contiguous, to write into.

    Raises:
        ValueError: naming the argument whose dtype, shape or device does not fit.
    """
    _check_update(a, b, out)
    _check("weight", weight, out.shape, torch.bfloat16, out.device)
    words = weight.contiguous().view(torch.int32)
    with torch.cuda.device(out.device):
        launch(words, None, a, b, scale, out)


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
    with torch.cuda.device(out.device):
        launch(blocks.contiguous(), scales.contiguous(), a, b, scale, out)


def launch(
    base: Tensor, scales: Tensor | None, a: Tensor, b: Tensor, scale: float, out: Tensor
) -> None:
    """Run the kernel on checked arguments.

    Args:
        base: int32 words of a dense base, or with ``scales`` the blocks of a packed one.
        scales: of the blocks; None for a dense base.
        a, b, scale, out: as above.
    """
    if out.numel() == 0:
        return

    rows = out.shape[-2]
    words = out.shape[-1] // 2
    experts = out.numel() // (2 * rows * words)
    grid = (triton.cdiv(words, WORDS), triton.cdiv(rows, ROWS), experts)
    _merge_kernel[grid](
        base,
        # Not read of a dense base, but it must be a pointer.
        base if scales is None else scales,
        a.contiguous().view(torch.int32),
        b.contiguous(),
        out.view(torch.int32),
        scale,
        rows,
        words,
        PACKED=scales is not None,
        RANK=a.shape[-2],
        ROWS=ROWS,
        WORDS=WORDS,
        enable_fp_fusion=False,
    )


def _check_update(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Refuse factors and a result that do not belong together."""
    if out.dtype != torch.bfloat16 or not out.is_contiguous() or out.shape[-1] % 2:
        raise ValueError(
            "out must be a contiguous bf16 tensor with an even number of columns, "
            f"got {out.dtype} {list(out.shape)}"
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
