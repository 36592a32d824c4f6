"""Quantise and dequantise MXFP4 tensors in the layout of the GPT-OSS checkpoints."""

import torch

from gptoss_kernels.mxfp4 import cpu

BLOCK = 32
"""Values that share a scale."""


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """MXFP4 to bf16, bit for bit what Hugging Face's ``convert_moe_packed_tensors`` computes before its transpose.

    Args:
        blocks: [..., n, 16] uint8; byte j of a block holds values 2j (low nibble) and 2j + 1 (high nibble).
        scales: [..., n] uint8; the block's values are multiplied by 2 ** (scale - 127).
        out: [..., n * 32] bf16, contiguous, to write into.

    Returns:
        [..., n * 32] bf16. Exact for scales up to 252; above, bf16 overflows to infinity. Zeros keep their sign.

    Raises:
        ValueError: naming the argument whose dtype, shape or device does not fit."""
    if blocks.dtype != torch.uint8 or blocks.dim() < 2 or blocks.shape[-1] != BLOCK // 2:
        raise ValueError(f"blocks must be uint8 [..., n, 16], got {blocks.dtype} {list(blocks.shape)}")
    if scales.dtype != torch.uint8 or scales.shape != blocks.shape[:-1] or scales.device != blocks.device:
        raise ValueError(
            f"scales must be uint8 {list(blocks.shape[:-1])} on {blocks.device}, "
            f"got {scales.dtype} {list(scales.shape)} on {scales.device}"
        )
    shape = (*blocks.shape[:-2], blocks.shape[-2] * BLOCK)
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=blocks.device)
    elif out.dtype != torch.bfloat16 or out.shape != shape or out.device != blocks.device or not out.is_contiguous():
        raise ValueError(f"out must be a contiguous bf16 {list(shape)} on {blocks.device}")
    blocks, scales = blocks.contiguous(), scales.contiguous()
    if blocks.is_cuda:
        from gptoss_kernels.mxfp4 import gpu

        gpu.dequantize(blocks, scales, out)
    else:
        cpu.dequantize(blocks, scales, out)
    return out


def quantize(x: torch.Tensor, scale_hint: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 to MXFP4: scale 2 ** ceil(log2(amax / 6)), values to nearest, ties to the even code.

    Args:
        x: [..., n * 32] bf16, finite.
        scale_hint: [..., n] uint8, the scales ``x`` was dequantised with. Where such a scale reproduces the block's
            bf16 bits exactly it is kept, so an unchanged checkpoint comes back byte for byte; elsewhere it is
            recomputed.

    Returns:
        blocks [..., n, 16] uint8 and scales [..., n] uint8, as ``dequantize`` takes them. The sign of zero is kept.

    Raises:
        ValueError: naming the argument, also when x holds NaN or Inf (on a GPU only with GPTOSS_KERNELS_DEBUG=1, as
            looking would wait for the stream)."""
    if x.dtype != torch.bfloat16 or x.dim() < 1 or x.shape[-1] % BLOCK:
        raise ValueError(f"x must be bf16 with a last dimension divisible by 32, got {x.dtype} {list(x.shape)}")
    shape = (*x.shape[:-1], x.shape[-1] // BLOCK)
    if scale_hint is not None:
        if scale_hint.dtype != torch.uint8 or scale_hint.shape != shape or scale_hint.device != x.device:
            raise ValueError(
                f"scale_hint must be uint8 {list(shape)} on {x.device}, "
                f"got {scale_hint.dtype} {list(scale_hint.shape)} on {scale_hint.device}"
            )
        scale_hint = scale_hint.contiguous()
    x = x.contiguous()
    blocks = torch.empty((*shape, BLOCK // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty(shape, dtype=torch.uint8, device=x.device)
    if x.is_cuda:
        from gptoss_kernels.mxfp4 import gpu

        gpu.quantize(x, scale_hint, blocks, scales)
    else:
        cpu.quantize(x, scale_hint, blocks, scales)
    return blocks, scales
