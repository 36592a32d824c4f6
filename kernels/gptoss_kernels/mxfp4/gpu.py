"""The GPU path, in Triton. Same bits as the CPU path for every finite input.

A program takes ROWS blocks of 32 values. e2m1 is a sign, two bits of exponent and one of mantissa:
codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and bit 3 is the sign.
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 128
"""Blocks of 32 values that a program takes."""


@triton.jit
def decode_magnitude(code, exponent_bits):
    """Turn an e2m1 code, with its scale as fp32 bits, into fp32 without its sign."""
    magnitude = code & 7
    # 0 and 0.5 are subnormal in e2m1. The others are (1 + m / 2) * 2^(e - 1): their three bits go
    # straight into fp32's fields, the exponent 126 higher.
    normal = ((magnitude + 252) << 22).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return value * exponent_bits.to(tl.float32, bitcast=True)


@triton.jit
def _decode(code, exponent_bits):
    """Turn an e2m1 code, with its scale as fp32 bits, into bf16 bits."""
    bits = decode_magnitude(code, exponent_bits).to(tl.bfloat16).to(tl.int16, bitcast=True)
    return bits | ((code & 8) << 12).to(tl.int16)


@triton.jit
def _dequantize_kernel(blocks, scales, out, count, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    source = blocks + row[:, None] * 16 + tl.arange(0, 16)[None, :]
    byte = tl.load(source, mask=inside[:, None], other=0).to(tl.int32)
    scale = tl.load(scales + row, mask=inside, other=127).to(tl.int32)

    # 2^(scale - 127) as fp32 bits; scale 0 is the subnormal 2^-127
    bits = tl.where(scale == 0, 0x00400000, scale << 23)[:, None]
    pair = tl.join(_decode(byte & 15, bits), _decode(byte >> 4, bits))
    values = tl.reshape(pair, (ROWS, 32)).to(tl.bfloat16, bitcast=True)
    target = out + row[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(target, values, mask=inside[:, None])


@triton.jit
def _encode(magnitudes, scale):
    """Turn words of two bf16 magnitudes into two codes each, and tell whether both are exact.

    Codes are 0 to 8; 8 means too large. Both halves of a word are computed at once.

    With e the exponent of the scaled magnitude x, clamped to 0..2, the e2m1 numbers near x are
    2^(e - 1) apart. Adding 1.5 * 2^(e + 6), the anchor, in bf16 rounds x to a multiple of that,
    ties to even: bf16's mantissa of 7 bits ends there. The multiple is in the sum's low bits, and
    the code is that plus 2e. Subtracting the anchor again gives the rounded number, and scaled
    back the value that the code stands for."""
    # 2^(127 - scale) and its inverse, subnormal at the ends, in both halves
    factor = tl.where(scale >= 254, 0x0040, (254 - scale) << 7) * 0x10001
    inverse = tl.where(scale == 0, 0x0040, scale << 7) * 0x10001

    # bf16 pairs: 0x8000 is -0 (x * factor + -0 keeps the sign of 0), 0x3F80 is 1, 0x4080 is 4,
    # 0x4100 is 8. binade is 2^e: the bits of x's exponent between those of 1 and 4. Adding 0x0340
    # to its bits makes 1.5 * 2^(e + 6): 6 exponents higher, and the mantissa's first bit.
    codes, values = tl.inline_asm_elementwise(
        """{
        .reg .b32 x, binade, anchor, zero, one, four, eight;
        mov.b32 zero, 0x80008000;
        mov.b32 one, 0x3F803F80;
        mov.b32 four, 0x40804080;
        mov.b32 eight, 0x41004100;
        fma.rn.bf16x2 x, $2, $3, zero;
        min.bf16x2 x, x, eight;
        and.b32 binade, x, 0x7F807F80;
        max.bf16x2 binade, binade, one;
        min.bf16x2 binade, binade, four;
        add.u32 anchor, binade, 0x03400340;
        fma.rn.bf16x2 x, x, one, anchor;
        xor.b32 anchor, anchor, 0x80008000;
        fma.rn.bf16x2 anchor, x, one, anchor;
        fma.rn.bf16x2 $1, anchor, $4, zero;
        and.b32 x, x, 0x000F000F;
        shr.u32 binade, binade, 6;
        add.u32 x, x, binade;
        sub.u32 $0, x, 0x00FE00FE;
        }""",
        "=r,=r,r,r,r",
        [magnitudes, factor[:, None], inverse[:, None]],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )

    # exact: the value that the code stands for is x, and x was not too large
    return codes, ((values ^ magnitudes) | (codes & 0x00080008)) == 0


@triton.jit
def _quantize_kernel(pairs, hint, blocks, scales, count, HINT: tl.constexpr, ROWS: tl.constexpr):
    # a word holds values 2j (low half) and 2j + 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    where = row[:, None] * 16 + tl.arange(0, 16)[None, :]
    word = tl.load(pairs + where, mask=inside[:, None], other=0)
    magnitudes = word & 0x7FFF7FFF

    if HINT:
        scale = tl.load(hint + row, mask=inside, other=0).to(tl.int32)
        codes, exact = _encode(magnitudes, scale)
        # keep a hint that gives back every bit of its row
        keep = tl.min(exact.to(tl.int32), 1)
        if tl.min(keep, 0) == 0:
            fresh = _round_up_scale(magnitudes)
            scale = tl.where(keep == 1, scale, fresh)
            codes, _ = _encode(magnitudes, scale)
    else:
        scale = _round_up_scale(magnitudes)
        codes, _ = _encode(magnitudes, scale)

    # signs from bit 15 of each half to bit 3 of its code; then both codes into one byte
    codes |= (word >> 12) & 0x00080008
    tl.store(blocks + where, (codes | (codes >> 12)).to(tl.uint8), mask=inside[:, None])
    tl.store(scales + row, scale.to(tl.uint8), mask=inside)


@triton.jit
def _round_up_scale(magnitudes):
    """Compute 2^ceil(log2(amax / 6)) of every row as a biased exponent; codec.c derives it."""
    amax = tl.max(tl.maximum(magnitudes & 0xFFFF, magnitudes >> 16), 1)
    scale = tl.maximum((amax >> 7) - 2 + ((amax & 127) > 64).to(tl.int32), 1)
    return tl.where(amax == 0, 0, scale)


# Rounding to the values of MXFP4 writes no codes, so it needs none of the packed arithmetic above:
# both halves of a word are rounded in fp32, in operations that Triton's interpreter knows.


@triton.jit
def _round_magnitude(bits, factor, inverse):
    """Round a magnitude, as fp32 bits, to the nearest value with a scale; returns fp32 bits.

    With e the exponent of the scaled magnitude x, clamped to 0..2, the e2m1 numbers near x are
    2^(e - 1) apart. fp32's mantissa has 23 bits: next to 1.5 * 2^(e + 22), the anchor, its numbers
    are as far apart, so that adding and subtracting the anchor rounds x, ties to even."""
    x = bits.to(tl.float32, bitcast=True) * factor
    binade = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    binade = tl.minimum(tl.maximum(binade, 1.0), 4.0)
    anchor = binade * 6291456.0  # 1.5 * 2^22

    rounded = (x + anchor) - anchor
    return (rounded * inverse).to(tl.int32, bitcast=True)


@triton.jit
def _fake_quantize_kernel(addresses, out, count, ROWS: tl.constexpr):
    # Grid: blocks of a matrix, matrices. A word holds values 2j (low half) and 2j + 1 of a block.
    matrix = tl.program_id(1).to(tl.int64)
    pairs = tl.load(addresses + matrix).to(tl.pointer_type(tl.int32))
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < count)[:, None]
    where = row[:, None] * 16 + tl.arange(0, 16)[None, :]
    word = tl.load(pairs + where, mask=inside, other=0)
    magnitudes = word & 0x7FFF7FFF

    # 2^(127 - scale), and 2^(scale - 127), which is subnormal at scale 0
    scale = _round_up_scale(magnitudes)
    factor = ((254 - scale) << 23).to(tl.float32, bitcast=True)[:, None]
    inverse = tl.where(scale == 0, 0x00400000, scale << 23).to(tl.float32, bitcast=True)[:, None]
    low = _round_magnitude(magnitudes << 16, factor, inverse)
    high = _round_magnitude(magnitudes & -65536, factor, inverse)

    # The values have two bits of mantissa: the lower half of their fp32 bits is 0.
    signs = word ^ magnitudes
    rounded = (low >> 16) | high | signs
    tl.store(out + matrix * count * 16 + where, rounded, mask=inside)


def dequantize(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """Convert MXFP4 to bf16; contiguous CUDA tensors as checked by the public function."""
    count = scales.numel()
    if count == 0:
        return

    grid = (triton.cdiv(count, ROWS),)
    with torch.cuda.device(blocks.device):
        _dequantize_kernel[grid](blocks, scales, out, count, ROWS)


def quantize(x: Tensor, scale_hint: Tensor | None, blocks: Tensor, scales: Tensor) -> None:
    """Convert bf16 to MXFP4; contiguous CUDA tensors as checked by the public function.

    Raises:
        ValueError: with GPTOSS_KERNELS_DEBUG=1, when x holds NaN or Inf.
    """
    debug = os.environ.get("GPTOSS_KERNELS_DEBUG") == "1"
    if debug and not bool(torch.isfinite(x).all()):
        raise ValueError("x holds NaN or Inf")

    count = scales.numel()
    if count == 0:
        return

    # Without a hint the kernel does not read that argument, but it must be a pointer.
    has_hint = scale_hint is not None
    hint = scale_hint if has_hint else scales
    pairs = x.view(torch.int32)
    grid = (triton.cdiv(count, ROWS),)
    with torch.cuda.device(x.device):
        _quantize_kernel[grid](pairs, hint, blocks, scales, count, has_hint, ROWS)


def fake_quantize(matrices: Sequence[Tensor], out: Tensor) -> None:
    """Round bf16 matrices to MXFP4; contiguous CUDA tensors as checked by the public function.

    Raises:
        ValueError: with GPTOSS_KERNELS_DEBUG=1, naming the matrix that holds NaN or Inf.
    """
    if os.environ.get("GPTOSS_KERNELS_DEBUG") == "1":
        for i, matrix in enumerate(matrices):
            if not bool(torch.isfinite(matrix).all()):
                raise ValueError(f"matrices[{i}] holds NaN or Inf")

    with torch.cuda.device(out.device):
        launch_fake_quantize(matrices, out)


def launch_fake_quantize(matrices: Sequence[Tensor], out: Tensor) -> None:
    """Run the kernel on checked arguments."""
    if out.numel() == 0:
        return

    count = out[0].numel() // 32
    # From pinned memory: a copy from elsewhere would wait until the GPU has done what is queued.
    addresses = torch.tensor(
        [matrix.data_ptr() for matrix in matrices],
        dtype=torch.int64,
        pin_memory=out.is_cuda,
    )
    addresses = addresses.to(out.device, non_blocking=True)
    grid = (triton.cdiv(count, ROWS), len(matrices))
    _fake_quantize_kernel[grid](
        addresses,
        out.view(torch.int32),
        count,
        ROWS,
        # The products are exact, so fusing them with a sum would change nothing; but that is seen
        # only by whoever works it out.
        enable_fp_fusion=False,
    )
