"""Values of MXFP4 experts, as products on Hopper GPUs make them whenever they read a matrix.

Shifts and masks take the codes of a word of ``gptoss_hopper_layout`` apart into numbers of bf16's smallest
exponents. In triton_kernels 3.6 a multiplication by 2^126 makes values of these, and one by 2^(e - 127), for
a block's scale byte e, what the product needs. Both factors are powers of two, and so is their product
2^(e - 1), which bf16 has for every e up to 128: one multiplication, and the same bits.

Bits of a word, and bytes of scales, lie where they are soon in place, too. Eight codes take 13 instructions,
with triton_kernels' words 15 and with its two multiplications 19, and four factors 4 instead of 6.

Scale bytes above 128, for which 2^(e - 1) is infinite, are refused when a sync ends, before anything is
computed with them (``gptoss_synced_model``). With byte 0 triton_kernels makes a zero of every value, here
they are what they mean, at most 6 * 2^-127.
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from importlib import import_module
from typing import Any

import triton
import triton.language as tl

UNPACK = tl.constexpr("""{
    .reg .b32 moved, bit;
    and.b32 $0, $4, 0x81c081c0;
    shl.b32 moved, $4, 4;
    and.b32 $1, moved, 0x81c081c0;
    shf.l.wrap.b32 moved, $4, $4, 10;
    and.b32 $2, moved, 0x81c081c0;
    shl.b32 moved, $4, 6;
    and.b32 moved, moved, 0x80c080c0;
    shr.u32 bit, $4, 2;
    and.b32 bit, bit, 0x01000100;
    or.b32 $3, moved, bit;
}""")
"""A word of eight codes, $4, into four pairs of bf16 numbers: in each half of the word the mask takes a sign
and the lowest three bits of exponent and mantissa. Those of the second pair, rotated by 4, all lie inside the
word's shift by 4; those of the fourth pair lie in two parts where the others leave room."""
FACTORS = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x5140;
    shl.b32 $0, $0, 7;
    prmt.b32 $1, $2, 0, 0x7362;
    shl.b32 $1, $1, 7;
}""")
"""Four scales' bytes of storage, $2, into two pairs of bf16 numbers 2^(e - 1), whose exponents these bytes are:
first those of bytes 0 and 1, then those of 2 and 3."""


def install() -> None:
    """Let triton_kernels' products make their values like this, which no others find in our layouts."""
    products: Any = import_module("triton_kernels.matmul_ogs_details._matmul_ogs")
    # The kernel looks it up when it is compiled, which nobody has done yet.
    products.mxfp4_to_bf16_triton = scaled_values


@triton.jit
def scaled_values(x, scale, mx_axis: tl.constexpr):
    """Return what ``mxfp4_to_bf16_triton`` of triton_kernels does, in its place.

    Args:
        x: uint8 [rows / 4, 2 * inputs], a block of a matrix' storage.
        scale: uint8 [rows, inputs / 32].
        mx_axis: of the inputs, 1.

    Returns:
        bf16 [rows, inputs].
    """
    tl.static_assert(mx_axis == 1)
    first, second = tl.inline_asm_elementwise(
        asm=UNPACK,
        constraints="=r,=r,=r,=r,r",
        args=[x],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
    # The pairs of a word, one after the other.
    x = tl.join(first, second)
    x = x.reshape(x.shape[0], x.shape[1] // 4, 4, x.shape[2])
    x = x.trans(0, 1, 3, 2)
    x = x.reshape(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3])
    x = _in_order(x)

    scale = tl.inline_asm_elementwise(
        asm=FACTORS,
        constraints="=r,=r,r",
        args=[scale],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )
    scale = scale.expand_dims(2)
    scale = scale.broadcast_to(scale.shape[0], scale.shape[1], 32)
    scale = scale.reshape(x.shape)
    return x * scale


@triton.jit
def _in_order(x):
    """Bring values of the storage's order, [rows / 4, 4 * inputs], into the matrix', as
    ``_unshuffle_triton`` of triton_kernels does."""
    quarter: tl.constexpr = x.shape[0]
    values: tl.constexpr = x.shape[1]
    x = x.reshape(quarter // 4, 4, values // 256, 2, 4, 8, 2, 2)
    x = x.trans(0, 6, 1, 3, 2, 5, 4, 7)
    return x.reshape(quarter * 4, values // 4)
