"""Quantize and dequantize MXFP4 tensors in the layout of the GPT-OSS checkpoints."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gptoss_kernels.mxfp4 import cpu

BLOCK = 32
"""Values that share a scale."""


def dequantize(blocks: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Convert MXFP4 to bf16.

    Equals, bit for bit, what Hugging Face's ``convert_moe_packed_tensors`` computes before its
    transpose.

    Args:
        blocks: [..., n, 16] uint8; byte j of a block holds values 2j (low nibble) and 2j + 1 (high
            nibble).
        scales: [..., n] uint8; the block's values are multiplied by 2 ** (scale - 127).
        out: [..., n * 32] bf16, contiguous, to write into.

    Returns:
        [..., n * 32] bf16. Exact for scales up to 252; above, bf16 overflows to infinity. Zeros
        keep their sign.

    Raises:
        ValueError: naming the argument whose dtype, shape or device does not fit.
    """
    if blocks.dtype != torch.uint8 or blocks.dim() < 2 or blocks.shape[-1] != BLOCK // 2:
        raise ValueError(
            f"blocks must be uint8 [..., n, 16], got {blocks.dtype} {list(blocks.shape)}"
        )
    _check_scales("scales", scales, blocks.shape[:-1], blocks.device)

    shape = torch.Size((*blocks.shape[:-2], blocks.shape[-2] * BLOCK))
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=blocks.device)
    else:
        fits = out.dtype == torch.bfloat16 and out.shape == shape and out.device == blocks.device
        if not fits or not out.is_contiguous():
            raise ValueError(f"out must be a contiguous bf16 {list(shape)} on {blocks.device}")

    blocks = blocks.contiguous()
    scales = scales.contiguous()
    if blocks.is_cuda:
        from gptoss_kernels.mxfp4 import gpu

        gpu.dequantize(blocks, scales, out)
    else:
        cpu.dequantize(blocks, scales, out)
    return out


def quantize(x: Tensor, scale_hint: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Convert bf16 to MXFP4.

    The scale is 2 ** ceil(log2(amax / 6)); values go to the nearest code, ties to the even one.

    Args:
        x: [..., n * 32] bf16, finite.
        scale_hint: [..., n] uint8, the scales ``x`` was dequantized with. Where such a scale
            reproduces the block's bf16 bits exactly it is kept, so an unchanged checkpoint comes
            back byte for byte; elsewhere it is recomputed.

    Returns:
        blocks [..., n, 16] uint8 and scales [..., n] uint8, as ``dequantize`` takes them. The sign
        of zero is kept.

    Raises:
        ValueError: naming the argument, also when x holds NaN or Inf (on a GPU only with
            GPTOSS_KERNELS_DEBUG=1, as looking would wait for the stream).
    """
    if x.dtype != torch.bfloat16 or x.dim() < 1 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"x must be bf16 with a last dimension divisible by 32, got {x.dtype} {list(x.shape)}"
        )
    shape = torch.Size((*x.shape[:-1], x.shape[-1] // BLOCK))
    if scale_hint is not None:
        _check_scales("scale_hint", scale_hint, shape, x.device)
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


def fake_quantize(matrices: Sequence[Tensor], out: Tensor) -> Tensor:
    """Round matrices of one shape to the values that MXFP4 holds, without making blocks.

    ``out[i]`` gets ``dequantize(*quantize(matrices[i].bfloat16()))``, bit for bit. On a GPU bf16
    matrices, which may lie anywhere, are one pass over memory.

    Args:
        matrices: n tensors [..., m * 32] of floats, contiguous and finite.
        out: [n, ..., m * 32] of the same dtype, contiguous, to write into.

    Returns:
        ``out``.

    Raises:
        ValueError: naming the argument whose dtype, shape or device does not fit, and as
            ``quantize`` does.
    """
    _check_matrices(matrices, out)
    if out.is_cuda and out.dtype == torch.bfloat16:
        from gptoss_kernels.mxfp4 import gpu

        gpu.fake_quantize(matrices, out)
        return out

    for matrix, place in zip(matrices, out, strict=True):
        place.copy_(dequantize(*quantize(matrix.to(torch.bfloat16))))
    return out


def _check_matrices(matrices: Sequence[Tensor], out: Tensor) -> None:
    if not out.is_floating_point() or not out.is_contiguous() or out.shape[-1] % BLOCK:
        raise ValueError(
            "out must be contiguous floats with a last dimension divisible by 32, "
            f"got {out.dtype} {list(out.shape)}"
        )
    if len(matrices) != len(out):
        raise ValueError(f"out has room for {len(out)} matrices, got {len(matrices)}")

    shape = out.shape[1:]
    for i, matrix in enumerate(matrices):
        fits = matrix.dtype == out.dtype and matrix.shape == shape and matrix.device == out.device
        if not fits or not matrix.is_contiguous():
            raise ValueError(
                f"matrices[{i}] must be a contiguous {out.dtype} {list(shape)} on {out.device}, "
                f"got {matrix.dtype} {list(matrix.shape)} on {matrix.device}"
            )


def _check_scales(name: str, scales: Tensor, shape: torch.Size, device: torch.device) -> None:
    if scales.dtype != torch.uint8 or scales.shape != shape or scales.device != device:
        raise ValueError(
            f"{name} must be uint8 {list(shape)} on {device}, "
            f"got {scales.dtype} {list(scales.shape)} on {scales.device}"
        )
