"""What a conversion says of itself when it is done."""

import math
from dataclasses import dataclass, field
from typing import Literal

Check = Literal["sample", "all"]
"""``sample``: all that is not an expert, and the experts of one layer, the next one every time. ``all``: everything."""


@dataclass(frozen=True)
class ReadBack:
    """What was read back and found to be as it should be; printing it is the answer for a person."""

    check: Check
    layer: int | None
    """Whose experts were compared; None: those of all layers."""
    layers: int
    compared: int
    """Parameters whose values were compared."""
    parameters: int
    """Parameters of the model."""
    seconds: float
    added_seconds: float
    """Of ``seconds`` those for which the conversion had nothing else to wait for: all but the time that what was
    written took to get from the system's memory to the disk."""

    def __str__(self) -> str:
        if self.layer is None:
            what = f"all {self.parameters:,} parameters"
        else:
            what = (
                f"{self.compared:,} of {self.parameters:,} parameters, all that are not of an expert and the experts "
                f"of layer {self.layer} (next time: layer {(self.layer + 1) % self.layers})"
            )
        return f"read back and compared in {self.seconds:.1f} s: {what}"


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

    def is_close_to(self, other: "QuantisationError | None") -> bool:
        """Whether the two are of the same experts, and equal but for the order of fp32 sums."""
        if other is None or (self.experts, self.changed) != (other.experts, other.changed):
            return False
        ours = (self.squared_error, self.squared, self.largest)
        theirs = (other.squared_error, other.squared, other.largest)
        return all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(ours, theirs, strict=True))


@dataclass
class ExportReport:
    """What an export did to the experts; printing it is the answer for a person."""

    errors: dict[str, QuantisationError] = field(default_factory=dict)
    """By tensor name; empty unless the export is MXFP4."""
    read_back: ReadBack | None = None
    """What was compared after it was written."""

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
