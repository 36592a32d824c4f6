"""Quantization of a checkpoint's expert matrices to MXFP4, which keeps unchanged bytes."""

import torch

from converters.bits import same_bits
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.hf_layouts import mxfp4_shapes
from converters.reports import RoundingError
from gptoss_kernels import mxfp4


def quantize(
    name: str, expert: int, matrix: torch.Tensor, reference: HfDirectory | None
) -> tuple[dict[str, torch.Tensor], RoundingError]:
    """Quantize one expert's matrix and measure the rounding error.

    Args:
        name: Hugging Face name of the tensor that stacks the experts.
        expert: index of the expert.
        matrix: [in, out], bf16 or fp32.
        reference: directory of the original model. If one of its scales reproduces a block exactly,
            the scale is kept, so that unchanged blocks keep their bytes. None for new scales.

    Returns:
        Blocks uint8 [out, in / 32, 16] and scales uint8 [out, in / 32] by stored name, and the
        rounding error.

    Raises:
        ConversionError: if the matrix holds NaN or infinity.
    """
    original = None
    scale_hint = None
    is_unchanged = False
    if reference is not None:
        original = reference.read_mxfp4(name, expert)
    if original is not None:
        _, scale_hint = original

    # Blocks run along the inputs, the last axis of the output-major matrix.
    exact = matrix.to(torch.bfloat16).T.contiguous()
    try:
        blocks, scales = mxfp4.quantize(exact, scale_hint)
    except ValueError as cause:
        raise ConversionError(
            f"tensor {name}, expert {expert}: cannot be quantized ({cause})"
        ) from None

    blocks_name, scales_name = mxfp4_shapes(name, (1, *matrix.shape))
    packed = {blocks_name: blocks, scales_name: scales}
    if original is not None:
        original_blocks, original_scales = original
        is_unchanged = same_bits(blocks, original_blocks) and same_bits(scales, original_scales)

    # A small update can round to the reference's bytes, so equal bytes do not prove that the error
    # is 0.
    restored = mxfp4.dequantize(blocks, scales)
    is_exact = same_bits(restored, exact) and same_bits(exact.to(matrix.dtype), matrix.T)
    if is_unchanged and is_exact:
        return packed, RoundingError(experts=1)

    # Compare with the original matrix: rounding fp32 to bf16 is part of the error.
    values = matrix.T.float()
    difference = restored.float() - values
    error = RoundingError(
        experts=1,
        changed=1,
        squared_error=float(difference.square().sum()),
        squared=float(values.square().sum()),
        largest=float(difference.abs().max()),
    )
    return packed, error
