"""Reports printed at the end of a conversion."""

import math
from dataclasses import dataclass, field
from typing import Literal

Check = Literal["sample", "all"]
"""Scope of a comparison.

``sample``: everything but experts, and the experts of one layer, a different layer every time.
``all``: everything.
"""


@dataclass(frozen=True)
class ReadBackResult:
    """Result of a successful comparison. ``str`` gives a text for the user."""

    check: Check
    layer: int | None
    """Layer whose experts were compared; None for all layers."""
    layers: int
    """Layers in the model."""
    compared: int
    """Number of parameters whose values were compared."""
    parameters: int
    """Parameters in the model."""
    seconds: float
    """Duration of the comparison, in seconds."""
    added_seconds: float
    """Part of ``seconds`` that the comparison adds to the conversion, in seconds.

    The rest overlaps with the sync of the written files to the disk.
    """

    def __str__(self) -> str:
        if self.layer is None:
            scope = f"all {self.parameters:,} parameters"
        else:
            # As in ``compared_parameters.next_layer``.
            next_layer = (self.layer + 1) % self.layers
            scope = (
                f"{self.compared:,} of {self.parameters:,} parameters: all outside of experts, and "
                f"the experts of layer {self.layer} (next time: layer {next_layer})"
            )
        return f"read back and compared in {self.seconds:.1f} s: {scope}"


@dataclass
class RoundingError:
    """Rounding error of the experts in one Hugging Face tensor."""

    experts: int = 0
    """Number of experts."""
    changed: int = 0
    """Number of experts that differ from the reference, before or after quantization.

    Without an MXFP4 reference: all experts.
    """
    squared_error: float = 0.0
    """Sum of (quantized - exact)**2 over the elements of the changed experts."""
    squared: float = 0.0
    """Sum of exact**2 over the elements of the changed experts."""
    largest: float = 0.0
    """Largest absolute error of an element."""

    @property
    def relative(self) -> float:
        """Root mean square error over root mean square value."""
        if self.squared == 0:
            return 0.0
        return math.sqrt(self.squared_error / self.squared)

    def add(self, other: "RoundingError") -> None:
        """Add the rounding error of other experts."""
        self.experts += other.experts
        self.changed += other.changed
        self.squared_error += other.squared_error
        self.squared += other.squared
        self.largest = max(self.largest, other.largest)

    def is_close_to(self, other: "RoundingError | None") -> bool:
        """Return True if both are of the same experts and equal up to the order of fp32 sums."""
        # Rounding never changes how many experts keep their bytes, so compare the counts exactly.
        if other is None or (self.experts, self.changed) != (other.experts, other.changed):
            return False
        return (
            math.isclose(self.squared_error, other.squared_error, rel_tol=1e-4)
            and math.isclose(self.squared, other.squared, rel_tol=1e-4)
            and math.isclose(self.largest, other.largest, rel_tol=1e-4)
        )


@dataclass
class ExportReport:
    """Effect of an export on the experts. ``str`` gives a text for the user."""

    errors: dict[str, RoundingError] = field(default_factory=dict)
    """Rounding error by tensor name; empty unless the export is MXFP4."""
    read_back: ReadBackResult | None = None
    """Result of the comparison after writing; None before."""

    def add(self, name: str, error: RoundingError) -> None:
        """Add the rounding error of one more expert in the tensor ``name``."""
        self.errors.setdefault(name, RoundingError()).add(error)

    def __str__(self) -> str:
        lines = [
            f"{name}: {error.changed} of {error.experts} experts quantized, relative error "
            f"{error.relative:.3g}, largest {error.largest:.3g}"
            for name, error in self.errors.items()
            if error.changed
        ]

        # Counted over all tensors: the lines above omit tensors without a change.
        experts = sum(error.experts for error in self.errors.values())
        kept = experts - sum(error.changed for error in self.errors.values())
        lines.append(f"{kept} of {experts} expert matrices equal the reference's")
        return "\n".join(lines)


@dataclass
class MergeRoundingError:
    """Error of merged weights by quantization."""

    values: int = 0
    """Number of values."""
    changed: int = 0
    """Number of values that MXFP4 cannot represent."""
    squared_error: float = 0.0
    """Sum of (quantized - merged)**2."""
    squared: float = 0.0
    """Sum of merged**2."""
    squared_update: float = 0.0
    """Sum of (merged - base)**2."""

    @property
    def relative(self) -> float:
        """Root mean square error over root mean square value."""
        return _root_of_ratio(self.squared_error, self.squared)

    @property
    def relative_to_update(self) -> float:
        """Root mean square error over root mean square update; above 1, the error is larger."""
        return _root_of_ratio(self.squared_error, self.squared_update)

    def add(self, other: "MergeRoundingError") -> None:
        """Add the rounding error of other weights."""
        self.values += other.values
        self.changed += other.changed
        self.squared_error += other.squared_error
        self.squared += other.squared
        self.squared_update += other.squared_update

    def __str__(self) -> str:
        # The ratio to an update of 0 would be infinite.
        if self.squared_update == 0:
            update_share = "the update is 0"
        else:
            update_share = f"{self.relative_to_update:.3g} of the update"
        changed = self.changed / max(1, self.values)
        return (
            f"relative error {self.relative:.3g}, {update_share}, {changed:.1%} of the values "
            "changed"
        )


@dataclass
class UpdateRoundingError:
    """Part of an adapter's update that rounding the merged weight loses."""

    squared_error: float = 0.0
    """Sum of (merged - base - update)**2."""
    squared_update: float = 0.0
    """Sum of update**2."""

    @property
    def relative(self) -> float:
        """Root mean square error over root mean square update."""
        return _root_of_ratio(self.squared_error, self.squared_update)

    def add(self, other: "UpdateRoundingError") -> None:
        """Add the rounding error of another weight."""
        self.squared_error += other.squared_error
        self.squared_update += other.squared_update


@dataclass
class MergeReport:
    """Rounding errors and warnings of a merge. ``str`` gives a text for the user."""

    layers: dict[int, MergeRoundingError] = field(default_factory=dict)
    """Rounding error by layer; empty unless the merged model is MXFP4."""
    tensors: dict[str, MergeRoundingError] = field(default_factory=dict)
    """Rounding error by tensor name; empty unless the merged model is MXFP4."""
    updates: dict[str, UpdateRoundingError] = field(default_factory=dict, compare=False)
    """Rounding error by parameter name.

    Empty for adapters that were trained by this project, because the trainer rounds the same way.
    """
    warnings: list[str] = field(default_factory=list, compare=False)
    """Checks that were not possible."""

    def add(self, layer: int, name: str, error: MergeRoundingError) -> None:
        """Add the rounding error of one more expert in the tensor ``name``."""
        self.layers.setdefault(layer, MergeRoundingError()).add(error)
        self.tensors.setdefault(name, MergeRoundingError()).add(error)

    def add_update(self, name: str, error: UpdateRoundingError) -> None:
        """Add the rounding error of one more adapter for the parameter ``name``."""
        self.updates.setdefault(name, UpdateRoundingError()).add(error)

    def __str__(self) -> str:
        lines = [f"warning: {warning}" for warning in self.warnings]
        lines += self._quantization_lines()

        # Adapters of PEFT and unmerged experts have such errors, because they were trained without
        # rounding merged weights.
        if self.updates:
            total = UpdateRoundingError()
            for update in self.updates.values():
                total.add(update)
            worst = max(self.updates, key=lambda name: self.updates[name].relative)
            lines.append(
                f"rounding the merged weights loses {total.relative:.1%} of the adapter's updates, "
                f"most in {worst}: {self.updates[worst].relative:.1%}"
            )
        # Without quantization, the merge repeats the trainer's arithmetic.
        elif not self.layers:
            lines.append("the merged weights equal the trainer's bit for bit")
        return "\n".join(lines)

    def _quantization_lines(self) -> list[str]:
        """Return the lines on MXFP4 experts: each layer, the worst tensor, all experts."""
        if not self.layers:
            return []
        lines = [f"layer {layer}: {error}" for layer, error in self.layers.items()]
        # One bad tensor hardly changes the mean of its layer, so name the worst tensor.
        worst = max(self.tensors, key=lambda name: self.tensors[name].relative)
        lines.append(f"worst tensor: {worst}, {self.tensors[worst]}")

        total = MergeRoundingError()
        for error in self.layers.values():
            total.add(error)
        lines.append(f"all experts: {total}")
        return lines


def _root_of_ratio(numerator: float, denominator: float) -> float:
    """Return sqrt(numerator / denominator); 0 for 0 / 0, infinity for x / 0."""
    if numerator == 0:
        return 0.0
    # An error without an update must not look like no error.
    if denominator == 0:
        return math.inf
    return math.sqrt(numerator / denominator)
