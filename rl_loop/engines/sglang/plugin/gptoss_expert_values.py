"""Decoding of MXFP4 experts to bf16 in GEMMs on Hopper GPUs.

Shifts and masks turn the codes in a word of ``gptoss_hopper_layout`` into bf16 numbers with the
smallest exponents. Then triton_kernels 3.6 multiplies twice: by 2^126, which gives the values, and
by 2^(e - 127), where e is the block's scale byte. Both factors are powers of two. Their product
2^(e - 1) is a bf16 number for every e up to 128. Therefore this module multiplies once, with the
same bits as result.

The layout puts bits of words and bytes of scales where decoding needs few instructions: 13 for 8
codes, compared with 15 for triton_kernels' words and 19 with its two multiplications. Four scale
factors take 4 instructions instead of 6.

Scale bytes above 128, for which 2^(e - 1) is infinite, are rejected at the end of a sync, before
anything is computed with them (``gptoss_synced_model``). For scale byte 0 triton_kernels returns
zeros. This module returns the represented values, at most 6 * 2^-127.
"""

# Triton interprets parameter annotations, so its kernels have none.
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
"""PTX: a word of 8 codes, $4, to four pairs of bf16 numbers.

In each half of the word the mask selects a sign and the lowest three bits of exponent and mantissa.
The second pair, rotated by 4, lies entirely within the word shifted by 4. The fourth pair is in two
parts, in the bits that the other pairs do not use.
"""
FACTORS = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x5140;
    shl.b32 $0, $0, 7;
    prmt.b32 $1, $2, 0, 0x7362;
    shl.b32 $1, $1, 7;
}""")
"""PTX: 4 stored scale bytes, $2, to two pairs of bf16 numbers 2^(e - 1).

The stored bytes are the exponents of these numbers. First pair: bytes 0 and 1. Second pair: bytes 2
and 3.
"""


def install() -> None:
    """Let triton_kernels' GEMMs decode with ``scaled_values``, which the plugin's layout needs."""
    products: Any = import_module("triton_kernels.matmul_ogs_details._matmul_ogs")
    # The kernel looks the function up when it is compiled, which has not happened yet.
    products.mxfp4_to_bf16_triton = scaled_values


@triton.jit
def scaled_values(x, scale, mx_axis: tl.constexpr):
    """Decode and scale values, in place of triton_kernels' ``mxfp4_to_bf16_triton``.

    Args:
        x: uint8 [rows / 4, 2 * inputs], a block of a matrix's storage.
        scale: uint8 [rows, inputs / 32].
        mx_axis: dimension of the inputs, 1.

    Returns:
        bf16 [rows, inputs].
    """
    tl.static_assert(mx_axis == 1)
    # pack=4: the assembly reads four bytes as one 32-bit register.
    first, second = tl.inline_asm_elementwise(
        asm=UNPACK,
        constraints="=r,=r,=r,=r,r",
        args=[x],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
    # Join the pairs of each word, in sequence.
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
    """Reorder values from the storage's order, [rows / 4, 4 * inputs], to the matrix's order.

    Equal to ``_unshuffle_triton`` of triton_kernels.
    """
    quarter: tl.constexpr = x.shape[0]
    values: tl.constexpr = x.shape[1]
    x = x.reshape(quarter // 4, 4, values // 256, 2, 4, 8, 2, 2)
    x = x.trans(0, 6, 1, 3, 2, 5, 4, 7)
    return x.reshape(quarter * 4, values // 4)
