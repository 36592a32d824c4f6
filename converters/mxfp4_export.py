"""Expert matrices of a checkpoint as MXFP4, unchanged ones byte for byte as they were."""

import torch

from converters.bits import same_bits
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.hf_layouts import mxfp4_shapes
from converters.reports import QuantisationError
from gptoss_kernels import mxfp4


def quantise(
    name: str, expert: int, matrix: torch.Tensor, reference: HfDirectory | None
) -> tuple[dict[str, torch.Tensor], QuantisationError]:
    """Blocks [out, in / 32, 16] and scales [out, in / 32] of one expert's ``matrix`` [in, out], by stored name.

    Where a scale of ``reference`` reproduces a block exactly it is kept, so that what is unchanged has its bytes."""
    exact = matrix.to(torch.bfloat16).T.contiguous()
    original = reference.quantised(name, expert) if reference is not None else None
    try:
        packed = mxfp4.quantize(exact, None if original is None else original[1])
    except ValueError as error:
        raise ConversionError(f"tensor {name}, expert {expert}: cannot be quantised ({error})") from None
    result = QuantisationError(experts=1)
    if original is None or not all(same_bits(new, old) for new, old in zip(packed, original, strict=True)):
        wanted = matrix.T.float()  # not of ``exact``: an fp32 matrix loses by the rounding to bf16, too
        lost = mxfp4.dequantize(*packed).float() - wanted
        result.changed = 1
        result.squared_error, result.squared = float(lost.square().sum()), float(wanted.square().sum())
        result.largest = float(lost.abs().max())
    return dict(zip(mxfp4_shapes(name, (1, *matrix.shape)), packed, strict=True)), result
