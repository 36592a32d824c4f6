"""Expert matrices of a checkpoint as MXFP4, unchanged ones byte for byte as they were."""

from dataclasses import dataclass, field

import torch

from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.hf_layouts import mxfp4_shapes
from gptoss_kernels import mxfp4


@dataclass
class QuantisationError:
    """Of one Hugging Face tensor: what its experts lost by being quantised."""

    experts: int = 0
    """All of them."""
    changed: int = 0
    """Those whose bytes are not the reference's; all, without an MXFP4 reference."""
    squared_error: float = 0.0
    squared: float = 0.0
    """Sums over the elements of the changed experts: of (quantised - exact)**2 and of exact**2."""
    largest: float = 0.0
    """Largest absolute error of an element."""

    @property
    def relative(self) -> float:
        """Root mean square error over root mean square value."""
        return (self.squared_error / self.squared) ** 0.5 if self.squared else 0.0


@dataclass
class ExportReport:
    """What an export did to the experts; printing it is the answer for a person."""

    errors: dict[str, QuantisationError] = field(default_factory=dict)
    """By tensor name; empty unless the export is MXFP4."""

    def add(self, name: str, error: QuantisationError) -> None:
        """One more expert of the tensor ``name``."""
        total = self.errors.setdefault(name, QuantisationError())
        total.experts += error.experts
        total.changed += error.changed
        total.squared_error += error.squared_error
        total.squared += error.squared
        total.largest = max(total.largest, error.largest)

    def __str__(self) -> str:
        changed = {name: error for name, error in self.errors.items() if error.changed}
        lines = [
            f"{name}: {error.changed} of {error.experts} experts quantised, "
            f"relative error {error.relative:.3g}, largest {error.largest:.3g}"
            for name, error in changed.items()
        ]
        experts = sum(error.experts for error in self.errors.values())
        kept = experts - sum(error.changed for error in changed.values())
        return "\n".join([*lines, f"{kept} of {experts} expert matrices are byte for byte those of the reference"])


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
    if original is None or not all(torch.equal(new, old) for new, old in zip(packed, original, strict=True)):
        wanted = exact.float()
        lost = mxfp4.dequantize(*packed).float() - wanted
        result.changed = 1
        result.squared_error, result.squared = float(lost.square().sum()), float(wanted.square().sum())
        result.largest = float(lost.abs().max())
    return dict(zip(mxfp4_shapes(name, (1, *matrix.shape)), packed, strict=True)), result
