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
def _encode(magnitude_bits, scale):
    """bf16 magnitude bits and scale bytes -> the magnitude in steps of its binade (exact), those rounded, 4 * binade.

    With x the scaled magnitude and e its exponent, at least 0 and at most 2, the e2m1 numbers near x are 2^(e-1) apart:
    the code is rint(x * 2^(1-e)) + 2e, and x is one of them when nothing was rounded.
    """
    exponent = tl.maximum(magnitude_bits >> 7, scale)
    # beyond the largest binade everything saturates
    exponent = tl.minimum(exponent, scale + 2)
    value = (magnitude_bits << 16).to(tl.float32, bitcast=True)
    # x * 2^(1-e) = value * 2^(128 - exponent); 2^128 and 2^-127, 2^-128 are out of a normal factor's reach
    factor = tl.minimum(tl.maximum(255 - exponent, 1), 254)
    steps = value * (factor << 23).to(tl.float32, bitcast=True)
    steps = steps * tl.where(exponent == 0, 2.0, tl.where(exponent == 255, 0.5, tl.where(exponent == 256, 0.25, 1.0)))
    # adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits
    shifted = tl.minimum(steps, 8.0) + 12582912.0
    code = (shifted.to(tl.int32, bitcast=True) & 15) + 2 * (exponent - scale)
    # steps of a far too large scale underflow to 0, which is exact for zeros only
    exact = (shifted - 12582912.0 == steps) & (code < 8) & ((code != 0) | (magnitude_bits == 0))
    return tl.minimum(code, 7), exact


@triton.jit
def _quantize_kernel(x, hint, blocks, scales, count, HINT: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    values = tl.load(x + row[:, None] * 32 + tl.arange(0, 32)[None, :], mask=inside[:, None], other=0.0)
    bits = values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    magnitude = bits & 0x7FFF
    sign = (bits >> 12) & 8
    scale = tl.zeros((ROWS,), tl.int32)
    code = tl.zeros((ROWS, 32), tl.int32)
    missed = 1
    if HINT:
        scale = tl.load(hint + row, mask=inside, other=0).to(tl.int32)
        code, exact = _encode(magnitude, scale[:, None])
        keep = tl.min(exact.to(tl.int32), 1)
        missed = 1 - tl.min(keep, 0)
    if missed != 0:
        amax = tl.max(magnitude, 1)
        fresh_scale = tl.maximum((amax >> 7) - 2 + ((amax & 127) > 64).to(tl.int32), 1)
        fresh_scale = tl.where(amax == 0, 0, fresh_scale)
        fresh, _ = _encode(magnitude, fresh_scale[:, None])
        if HINT:
            scale = tl.where(keep == 1, scale, fresh_scale)
            code = tl.where((keep == 1)[:, None], code, fresh)
        else:
            scale, code = fresh_scale, fresh
    low, high = tl.split(tl.reshape(code | sign, (ROWS, 16, 2)))
    packed = (low | (high << 4)).to(tl.uint8)
    tl.store(blocks + row[:, None] * 16 + tl.arange(0, 16)[None, :], packed, mask=inside[:, None])
    tl.store(scales + row, scale.to(tl.uint8), mask=inside)


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
            _quantize_kernel[grid](x, hint, blocks, scales, count, scale_hint is not None, ROWS)
