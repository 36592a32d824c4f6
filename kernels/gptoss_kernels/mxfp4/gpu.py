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
def _encode(magnitude, scale):
    """Magnitudes (fp32, >= 0) and scale bytes -> codes 0..7, ties to even."""
    # two exact factors: 2^(127-scale) alone leaves fp32's range for scale 254
    half = (127 - scale) // 2
    rest = 127 - scale - half
    x = (
        magnitude
        * ((half + 127) << 23).to(tl.float32, bitcast=True)
        * ((rest + 127) << 23).to(tl.float32, bitcast=True)
    )
    code = (x > 0.25).to(tl.int32) + (x >= 0.75).to(tl.int32) + (x > 1.25).to(tl.int32) + (x >= 1.75).to(tl.int32)
    return code + (x > 2.5).to(tl.int32) + (x >= 3.5).to(tl.int32) + (x > 5.0).to(tl.int32)


@triton.jit
def _quantize_kernel(x, hint, blocks, scales, count, HINT: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    values = tl.load(x + row[:, None] * 32 + tl.arange(0, 32)[None, :], mask=inside[:, None], other=0.0)
    bits = values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    magnitude_bits = bits & 0x7FFF
    magnitude = (magnitude_bits << 16).to(tl.float32, bitcast=True)
    amax = tl.max(magnitude_bits, 1)
    scale = tl.maximum((amax >> 7) - 2 + ((amax & 127) > 64).to(tl.int32), 1)
    scale = tl.where(amax == 0, 0, scale)
    code = _encode(magnitude, scale[:, None])
    sign = (bits >> 12) & 8
    if HINT:
        hinted = tl.load(hint + row, mask=inside, other=127).to(tl.int32)
        other = _encode(magnitude, tl.minimum(hinted, 254)[:, None])
        scale_bits = tl.where(hinted == 0, 0x00400000, hinted << 23)[:, None]
        same = _decode(other | sign, scale_bits) == values.to(tl.int16, bitcast=True)
        keep = tl.min(same.to(tl.int32), 1) == 1
        scale = tl.where(keep, hinted, scale)
        code = tl.where(keep[:, None], other, code)
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
