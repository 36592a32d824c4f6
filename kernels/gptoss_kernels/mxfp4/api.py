"""Quantization and dequantization of MXFP4 tensors in the layout of the GPT-OSS checkpoints."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gptoss_kernels.mxfp4 import cpu

BLOCK = 32
"""Number of values that share a scale."""


def dequantize(blocks: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Convert MXFP4 to bf16.

    Bit-identical to ``convert_moe_packed_tensors`` of Hugging Face transformers before its
    transpose.

    Args:
        blocks: [..., n, 16] uint8. Byte j of a block holds value 2j in its low nibble and value
            2j + 1 in its high nibble.
        scales: [..., n] uint8. The factor of a block is 2 ** (scale - 127).
        out: [..., n * 32] bf16, contiguous. Receives the result; None to allocate it.

    Returns:
        [..., n * 32] bf16. Exact for scales up to 252; larger scales overflow to infinity. Zeros
        keep their sign.

    Raises:
        ValueError: an argument has a wrong dtype, shape or device. The message names it.

    Example:
        >>> # Code 2 is 1.0 in both nibbles. Scale 128 is the factor 2.
        >>> blocks = torch.full((1, 16), 0x22, dtype=torch.uint8)
        >>> dequantize(blocks, torch.tensor([128], dtype=torch.uint8)).unique().tolist()
        [2.0]
    """
    if blocks.dtype != torch.uint8 or blocks.dim() < 2 or blocks.shape[-1] != BLOCK // 2:
        raise ValueError(
            f"blocks must be uint8 [..., n, 16], got {blocks.dtype} {list(blocks.shape)}"
        )
    _check_scales("scales", scales, blocks.shape[:-1], blocks.device)

    # Checked in full: the kernels get bare pointers and would write out of bounds.
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
        # Imported here, so that converters on a CPU do not load Triton.
        from gptoss_kernels.mxfp4 import gpu

        gpu.dequantize(blocks, scales, out)
    else:
        cpu.dequantize(blocks, scales, out)
    return out


def quantize(x: Tensor, scale_hint: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Convert bf16 to MXFP4.

    The factor of a block is 2 ** ceil(log2(amax / 6)). Values round to the nearest code, ties to
    the even code.

    Args:
        x: [..., n * 32] bf16, finite.
        scale_hint: [..., n] uint8 scales from which ``x`` was dequantized. A block keeps its hint
            if the hint reproduces its bf16 bits, so unchanged weights give the original bytes.
            Other blocks get a computed scale. None to compute every scale.

    Returns:
        blocks [..., n, 16] uint8 and scales [..., n] uint8, in the layout of ``dequantize``. Zeros
        keep their sign.

    Raises:
        ValueError: an argument has a wrong dtype, shape or device, or x contains NaN or Inf. The
            message names the argument. On a GPU the values are checked only with
            GPTOSS_KERNELS_DEBUG=1, because the check waits for the stream.

    Example:
        >>> blocks, scales = quantize(torch.ones(2, 64, dtype=torch.bfloat16))
        >>> blocks.shape, scales.shape
        (torch.Size([2, 2, 16]), torch.Size([2, 2]))
        >>> bool((dequantize(blocks, scales) == 1).all())
        True
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
    """Round matrices to values of MXFP4, without packing them.

    ``out[i]`` becomes ``dequantize(*quantize(matrices[i].bfloat16()))``, bit for bit. bf16 matrices
    on a GPU take a single pass over memory, wherever each of them is.

    Args:
        matrices: n tensors [..., m * 32] of one shape and floating dtype, contiguous and finite.
        out: [n, ..., m * 32] with the dtype of the matrices, contiguous. Receives the result.

    Returns:
        ``out``.

    Raises:
        ValueError: an argument has a wrong dtype, shape or device, or a matrix contains NaN or Inf
            (on a GPU only with GPTOSS_KERNELS_DEBUG=1). The message names the argument.

    Example:
        >>> matrix = torch.linspace(0, 6, 32).reshape(1, 32)
        >>> fake_quantize([matrix], torch.empty(1, 1, 32)).unique().tolist()
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    _check_matrices(matrices, out)
    if out.is_cuda and out.dtype == torch.bfloat16:
        from gptoss_kernels.mxfp4 import gpu

        gpu.fake_quantize(matrices, out)
        return out

    # Other dtypes and CPUs go through the packed form: slower, with the same result by definition.
    for matrix, place in zip(matrices, out, strict=True):
        place.copy_(dequantize(*quantize(matrix.to(torch.bfloat16))))
    return out


def _check_matrices(matrices: Sequence[Tensor], out: Tensor) -> None:
    """Raise ValueError if the arguments of ``fake_quantize`` do not fit together."""
    if not out.is_floating_point() or not out.is_contiguous() or out.shape[-1] % BLOCK:
        raise ValueError(
            "out must be contiguous floats with a last dimension divisible by 32, "
            f"got {out.dtype} {list(out.shape)}"
        )
    if len(matrices) != len(out):
        raise ValueError(f"out has room for {len(out)} matrices, got {len(matrices)}")

    # The kernel gets only the address of each matrix, so a wrong shape would read out of bounds.
    shape = out.shape[1:]
    for i, matrix in enumerate(matrices):
        fits = matrix.dtype == out.dtype and matrix.shape == shape and matrix.device == out.device
        if not fits or not matrix.is_contiguous():
            raise ValueError(
                f"matrices[{i}] must be a contiguous {out.dtype} {list(shape)} on {out.device}, "
                f"got {matrix.dtype} {list(matrix.shape)} on {matrix.device}"
            )


def _check_scales(name: str, scales: Tensor, shape: torch.Size, device: torch.device) -> None:
    """Raise ValueError if the scales have a different dtype, shape or device."""
    if scales.dtype != torch.uint8 or scales.shape != shape or scales.device != device:
        raise ValueError(
            f"{name} must be uint8 {list(shape)} on {device}, "
            f"got {scales.dtype} {list(scales.shape)} on {scales.device}"
        )
