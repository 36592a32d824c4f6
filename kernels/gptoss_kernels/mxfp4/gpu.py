"""MXFP4 on the GPU, in Triton: bit-identical to the CPU for every finite input.

A program handles ROWS blocks of 32 values. An e2m1 code has 1 sign bit, 2 exponent bits and 1
mantissa bit. Codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Bit 3 is the sign.
"""

# Triton interprets the annotations of a kernel's parameters, so kernels have none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 128
"""Blocks of 32 values per program."""


@triton.jit
def decode_magnitude(code, exponent_bits):
    """Return the fp32 magnitude of an e2m1 code; ``exponent_bits`` is the scale as fp32 bits."""
    magnitude = code & 7
    # 0 and 0.5 are subnormal in e2m1. The other magnitudes are (1 + m / 2) * 2^(e - 1). Their three
    # bits move unchanged into the fields of fp32, with 126 added to the exponent.
    normal = ((magnitude + 252) << 22).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return value * exponent_bits.to(tl.float32, bitcast=True)


@triton.jit
def _decode(code, exponent_bits):
    """Return the bf16 bits of an e2m1 code; ``exponent_bits`` is the scale as fp32 bits."""
    # The sign is set last, as a bit, so that a negative zero keeps it.
    bits = decode_magnitude(code, exponent_bits).to(tl.bfloat16).to(tl.int16, bitcast=True)
    return bits | ((code & 8) << 12).to(tl.int16)


@triton.jit
def _dequantize_kernel(blocks, scales, out, count, ROWS: tl.constexpr):
    # 64-bit offsets: the experts of a 120B layer have 2.1e9 values, nearly 2**31.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    source = blocks + row[:, None] * 16 + tl.arange(0, 16)[None, :]
    byte = tl.load(source, mask=inside[:, None], other=0).to(tl.int32)
    scale = tl.load(scales + row, mask=inside, other=127).to(tl.int32)

    # 2^(scale - 127) as fp32 bits. Scale 0 is the subnormal 2^-127.
    bits = tl.where(scale == 0, 0x00400000, scale << 23)[:, None]
    pair = tl.join(_decode(byte & 15, bits), _decode(byte >> 4, bits))
    values = tl.reshape(pair, (ROWS, 32)).to(tl.bfloat16, bitcast=True)
    target = out + row[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(target, values, mask=inside[:, None])


@triton.jit
def _encode(magnitudes, scale):
    """Return the codes of words of two bf16 magnitudes, and whether both codes are exact.

    A code is 0 to 8; 8 means that the magnitude is too large. Both halves of a word are computed at
    the same time.
    """
    # 2^(127 - scale) and its inverse, subnormal at the ends of the range, in both halves of a word.
    factor = tl.where(scale >= 254, 0x0040, (254 - scale) << 7) * 0x10001
    inverse = tl.where(scale == 0, 0x0040, scale << 7) * 0x10001

    # Let x be the scaled magnitude and e its exponent, clamped to 0..2. Adjacent e2m1 numbers near
    # x differ by 2^(e - 1). Adding an anchor of 1.5 * 2^(e + 6) in bf16 rounds x to a multiple of
    # that difference, ties to even, because bf16 has a 7-bit mantissa. The low bits of the sum hold
    # the multiple, and the code is the multiple plus 2e. Subtracting the anchor gives the rounded
    # number. The inverse scale turns it into the decoded value.
    #
    # Triton has no operations on bf16 pairs, so the arithmetic is PTX. Constants: 0x8000 is -0
    # (adding it keeps the sign of a zero product), 0x3F80 is 1, 0x4080 is 4, 0x4100 is 8.
    #
    # binade is 2^e: the exponent bits of x, clamped between those of 1 and 4. Adding 0x0340 to the
    # bits of binade gives 1.5 * 2^(e + 6): an exponent larger by 6, and the first mantissa bit.
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

    # A code is exact if its decoded value equals the magnitude and the magnitude is not too large.
    return codes, ((values ^ magnitudes) | (codes & 0x00080008)) == 0


@triton.jit
def _quantize_kernel(pairs, hint, blocks, scales, count, HINT: tl.constexpr, ROWS: tl.constexpr):
    # A 32-bit word holds values 2j (low half) and 2j + 1 (high half), which share a byte of codes.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    where = row[:, None] * 16 + tl.arange(0, 16)[None, :]
    word = tl.load(pairs + where, mask=inside[:, None], other=0)
    magnitudes = word & 0x7FFF7FFF

    if HINT:
        scale = tl.load(hint + row, mask=inside, other=0).to(tl.int32)
        # Rows after the last block are zeros with scale 0, which is exact, so they cause no second
        # encoding.
        codes, exact = _encode(magnitudes, scale)
        # Keep a hint that reproduces every bit of its block. Unchanged weights keep all hints, so
        # most programs skip the second encoding.
        keep = tl.min(exact.to(tl.int32), 1)
        if tl.min(keep, 0) == 0:
            fresh = _round_up_scale(magnitudes)
            scale = tl.where(keep == 1, scale, fresh)
            codes, _ = _encode(magnitudes, scale)
    else:
        scale = _round_up_scale(magnitudes)
        codes, _ = _encode(magnitudes, scale)

    # Move the sign from bit 15 of each half to bit 3 of its code, then pack both codes into a byte.
    codes |= (word >> 12) & 0x00080008
    tl.store(blocks + where, (codes | (codes >> 12)).to(tl.uint8), mask=inside[:, None])
    tl.store(scales + row, scale.to(tl.uint8), mask=inside)


@triton.jit
def _round_up_scale(magnitudes):
    """Return the scale of every row: the biased exponent of 2^ceil(log2(amax / 6))."""
    # bf16 magnitudes order like their bits. The formula is derived at scale_of() in codec.c.
    amax = tl.max(tl.maximum(magnitudes & 0xFFFF, magnitudes >> 16), 1)
    scale = tl.maximum((amax >> 7) - 2 + ((amax & 127) > 64).to(tl.int32), 1)
    return tl.where(amax == 0, 0, scale)


# Rounding to MXFP4 values needs no codes, and therefore none of the packed arithmetic above. Both
# halves of a word are rounded in fp32. The interpreter of Triton supports these operations, so the
# CPU tests can run this kernel.


@triton.jit
def _round_magnitude(bits, factor, inverse):
    """Round a magnitude to the nearest MXFP4 value of its block; input and output are fp32 bits.

    ``factor`` is 2^(127 - scale) and ``inverse`` its reciprocal.
    """
    # Let x be the scaled magnitude and e its exponent, clamped to 0..2. Adjacent e2m1 numbers near
    # x differ by 2^(e - 1). fp32 has a 23-bit mantissa, so its numbers next to an anchor of 1.5 *
    # 2^(e + 22) have the same distance. Adding and subtracting the anchor therefore rounds x, ties
    # to even.
    x = bits.to(tl.float32, bitcast=True) * factor
    binade = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    binade = tl.minimum(tl.maximum(binade, 1.0), 4.0)
    anchor = binade * 6291456.0  # 1.5 * 2^22

    rounded = (x + anchor) - anchor
    return (rounded * inverse).to(tl.int32, bitcast=True)


@triton.jit
def _fake_quantize_kernel(addresses, out, count, ROWS: tl.constexpr):
    # Grid: ROWS blocks of a matrix, matrices. A word holds values 2j (low half) and 2j + 1 of a
    # block. `addresses` has one pointer per matrix, because each is a separate allocation.
    matrix = tl.program_id(1).to(tl.int64)
    pairs = tl.load(addresses + matrix).to(tl.pointer_type(tl.int32))
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < count)[:, None]
    where = row[:, None] * 16 + tl.arange(0, 16)[None, :]
    word = tl.load(pairs + where, mask=inside, other=0)
    magnitudes = word & 0x7FFF7FFF

    # 2^(127 - scale) and 2^(scale - 127). The latter is subnormal at scale 0.
    scale = _round_up_scale(magnitudes)
    # The largest finite bf16 gives scale 253, so the factor is always a normal number. In
    # `_encode` a hint can be any byte.
    factor = ((254 - scale) << 23).to(tl.float32, bitcast=True)[:, None]
    inverse = tl.where(scale == 0, 0x00400000, scale << 23).to(tl.float32, bitcast=True)[:, None]
    low = _round_magnitude(magnitudes << 16, factor, inverse)
    high = _round_magnitude(magnitudes & -65536, factor, inverse)

    # A rounded value has 1 mantissa bit, so the low half of its fp32 bits is 0.
    signs = word ^ magnitudes
    rounded = (low >> 16) | high | signs
    tl.store(out + matrix * count * 16 + where, rounded, mask=inside)


def dequantize(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """Convert MXFP4 to bf16. The public function has checked the arguments; all are contiguous.

    Args:
        blocks: [..., n, 16] uint8 on CUDA.
        scales: [..., n] uint8.
        out: [..., n * 32] bf16. Receives the result.
    """
    count = scales.numel()
    if count == 0:
        return

    grid = (triton.cdiv(count, ROWS),)
    with torch.cuda.device(blocks.device):
        _dequantize_kernel[grid](blocks, scales, out, count, ROWS)


def quantize(x: Tensor, scale_hint: Tensor | None, blocks: Tensor, scales: Tensor) -> None:
    """Convert bf16 to MXFP4. The public function has checked the arguments; all are contiguous.

    Args:
        x: [..., n * 32] bf16 on CUDA.
        scale_hint: [..., n] uint8, or None.
        blocks: [..., n, 16] uint8. Receives the codes.
        scales: [..., n] uint8. Receives the scales.

    Raises:
        ValueError: x contains NaN or Inf. Checked only with GPTOSS_KERNELS_DEBUG=1.
    """
    debug = os.environ.get("GPTOSS_KERNELS_DEBUG") == "1"
    if debug and not bool(torch.isfinite(x).all()):
        raise ValueError("x contains NaN or Inf")

    count = scales.numel()
    if count == 0:
        return

    # Without a hint the kernel does not read this argument, but needs a valid pointer.
    has_hint = scale_hint is not None
    hint = scale_hint if has_hint else scales
    pairs = x.view(torch.int32)
    grid = (triton.cdiv(count, ROWS),)
    with torch.cuda.device(x.device):
        _quantize_kernel[grid](pairs, hint, blocks, scales, count, has_hint, ROWS)


def fake_quantize(matrices: Sequence[Tensor], out: Tensor) -> None:
    """Round bf16 matrices to MXFP4 values. The public function has checked the arguments.

    Args:
        matrices: n tensors [..., m * 32] bf16 on CUDA, contiguous.
        out: [n, ..., m * 32] bf16. Receives the result.

    Raises:
        ValueError: a matrix contains NaN or Inf. Checked only with GPTOSS_KERNELS_DEBUG=1.
    """
    if os.environ.get("GPTOSS_KERNELS_DEBUG") == "1":
        for i, matrix in enumerate(matrices):
            if not bool(torch.isfinite(matrix).all()):
                raise ValueError(f"matrices[{i}] contains NaN or Inf")

    with torch.cuda.device(out.device):
        launch_fake_quantize(matrices, out)


def launch_fake_quantize(matrices: Sequence[Tensor], out: Tensor) -> None:
    """Launch the kernel of ``fake_quantize``; also runs in Triton's interpreter, on the CPU.

    Args:
        matrices: n tensors [..., m * 32] bf16, contiguous.
        out: [n, ..., m * 32] bf16. Receives the result.
    """
    if out.numel() == 0:
        return

    count = out[0].numel() // 32
    # Pinned memory: a copy from pageable memory would wait for all queued work of the GPU.
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
        # The products are exact (powers of 2), so fused multiply-adds would give the same bits.
        # Disabling them makes this independent of the compiler.
        enable_fp_fusion=False,
    )
