"""The GPU path, in Triton. Same bits as the CPU path for every finite input."""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import os

import torch
import triton
import triton.language as tl


@triton.jit
def _decode(code, exponent_bits):
    """e2m1 code and the scale as fp32 bits -> bf16."""
    magnitude = code & 7
    # 0, 0.5 are subnormal in e2m1; the others are (1 + m/2) * 2^(e-1), placed straight into fp32's fields
    normal = ((magnitude + 252) << 22).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    scale = exponent_bits.to(tl.float32, bitcast=True)
    bits = (value * scale).to(tl.bfloat16).to(tl.int16, bitcast=True)
    return bits | ((code & 8) << 12).to(tl.int16)


@triton.jit
def _dequantize_kernel(blocks, scales, out, count, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    byte = tl.load(blocks + row[:, None] * 16 + tl.arange(0, 16)[None, :], mask=inside[:, None], other=0).to(tl.int32)
    scale = tl.load(scales + row, mask=inside, other=127).to(tl.int32)
    # 2^(scale-127) as fp32 bits; scale 0 is the subnormal 2^-127
    bits = tl.where(scale == 0, 0x00400000, scale << 23)[:, None]
    pair = tl.join(_decode(byte & 15, bits), _decode(byte >> 4, bits))
    values = tl.reshape(pair, (ROWS, 32)).to(tl.bfloat16, bitcast=True)
    tl.store(out + row[:, None] * 32 + tl.arange(0, 32)[None, :], values, mask=inside[:, None])


@triton.jit
def _encode(magnitude_bits, factor):
    """bf16 magnitude bits and 2^(127 - scale) -> code 0..7, and whether the code is the value itself.

    With e the exponent of the scaled magnitude x, clamped to 0..2, the e2m1 numbers near x are 2^(e-1) apart. Adding
    1.5 * 2^(e+22) rounds x to a multiple of that, ties to even, and leaves the multiple in the sum's low bits.
    """
    value = (magnitude_bits << 16).to(tl.float32, bitcast=True)
    x = tl.minimum(value * factor, 8.0)
    binade = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000), 0x40800000)
    anchor = (binade + 0x0B400000).to(tl.float32, bitcast=True)
    moved = x + anchor
    code = (moved.to(tl.int32, bitcast=True) & 15) + (binade >> 22) - 254
    # a far too large scale underflows to 0, which is exact for zeros only
    exact = (moved - anchor == x) & (code < 8) & ((code != 0) | (magnitude_bits == 0))
    return tl.minimum(code, 7), exact


@triton.jit
def _factor(scale):
    """2^(127 - scale); for 254 it is a subnormal."""
    return tl.where(scale >= 254, 0x00400000, (254 - scale) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _quantize_kernel(pairs, hint, blocks, scales, count, HINT: tl.constexpr, ROWS: tl.constexpr):
    # a word holds values 2j (low half) and 2j + 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    where = row[:, None] * 16 + tl.arange(0, 16)[None, :]
    word = tl.load(pairs + where, mask=inside[:, None], other=0)
    low, high = word & 0x7FFF, (word >> 16) & 0x7FFF
    if HINT:
        scale = tl.load(hint + row, mask=inside, other=0).to(tl.int32)
        factor = _factor(scale)[:, None]
        low_code, low_exact = _encode(low, factor)
        high_code, high_exact = _encode(high, factor)
        keep = tl.min((low_exact & high_exact).to(tl.int32), 1)
        if tl.min(keep, 0) == 0:
            fresh_scale, fresh_low, fresh_high = _quantize_block(low, high)
            scale = tl.where(keep == 1, scale, fresh_scale)
            low_code = tl.where((keep == 1)[:, None], low_code, fresh_low)
            high_code = tl.where((keep == 1)[:, None], high_code, fresh_high)
    else:
        scale, low_code, high_code = _quantize_block(low, high)
    packed = low_code | ((word >> 12) & 0x8) | (high_code << 4) | ((word >> 24) & 0x80)
    tl.store(blocks + where, packed.to(tl.uint8), mask=inside[:, None])
    tl.store(scales + row, scale.to(tl.uint8), mask=inside)


@triton.jit
def _quantize_block(low, high):
    """Scale 2^ceil(log2(amax / 6)) of every row, and the codes under it."""
    amax = tl.max(tl.maximum(low, high), 1)
    scale = tl.maximum((amax >> 7) - 2 + ((amax & 127) > 64).to(tl.int32), 1)
    scale = tl.where(amax == 0, 0, scale)
    factor = _factor(scale)[:, None]
    low_code, _ = _encode(low, factor)
    high_code, _ = _encode(high, factor)
    return scale, low_code, high_code


ROWS = 128


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Contiguous CUDA tensors as checked by the public function."""
    count = scales.numel()
    if count:
        with torch.cuda.device(blocks.device):
            _dequantize_kernel[(triton.cdiv(count, ROWS),)](blocks, scales, out, count, ROWS)


def quantize(x: torch.Tensor, scale_hint: torch.Tensor | None, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Contiguous CUDA tensors as checked by the public function."""
    if os.environ.get("GPTOSS_KERNELS_DEBUG") == "1" and not bool(torch.isfinite(x).all()):
        raise ValueError("x holds NaN or Inf")
    count = scales.numel()
    if count:
        with torch.cuda.device(x.device):
            hint = scales if scale_hint is None else scale_hint
            grid = (triton.cdiv(count, ROWS),)
            _quantize_kernel[grid](x.view(torch.int32), hint, blocks, scales, count, scale_hint is not None, ROWS)
