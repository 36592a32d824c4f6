"""Reports printed at the end of a conversion."""

import math
from dataclasses import dataclass, field
from typing import Literal

Check = Literal["sample", "all"]
"""``sample``: all that is not an expert, and the experts of one layer, the next one every time.
``all``: everything."""


@dataclass(frozen=True)
class ReadBack:
    """What was read back and equals what should have been written; its text is for a person."""

    check: Check
    layer: int | None
    """Whose experts were compared; None: those of all layers."""
    layers: int
    """Of the model."""
    compared: int
    """Parameters whose values were compared."""
    parameters: int
    """Parameters of the model."""
    seconds: float
    added_seconds: float
    """Of ``seconds`` those for which the conversion had nothing else to wait for: all but the time
    that the system took to bring what was written to the disk."""

    def __str__(self) -> str:
        if self.layer is None:
            what = f"all {self.parameters:,} parameters"
        else:
            next_layer = (self.layer + 1) % self.layers
            what = (
                f"{self.compared:,} of {self.parameters:,} parameters, all that are not of an "
                f"expert and the experts of layer {self.layer} (next time: layer {next_layer})"
            )
        return f"read back and compared in {self.seconds:.1f} s: {what}"


@dataclass
class QuantizationLoss:
    """What the experts of one Hugging Face tensor lost by being quantized."""

    experts: int = 0
    """All of them."""
    changed: int = 0
    """Those whose bytes are not the reference's; all, without an MXFP4 reference."""
    squared_error: float = 0.0
    """Sum of (quantized - exact)**2 over the elements of the changed experts."""
    squared: float = 0.0
    """Sum of exact**2 over the same elements."""
    largest: float = 0.0
    """Largest absolute error of an element."""

    @property
    def relative(self) -> float:
        """Root mean square error over root mean square value."""
        if self.squared == 0:
            return 0.0
        return math.sqrt(self.squared_error / self.squared)

    def add(self, other: "QuantizationLoss") -> None:
        """Take further experts into account."""
        self.experts += other.experts
        self.changed += other.changed
        self.squared_error += other.squared_error
        self.squared += other.squared
        self.largest = max(self.largest, other.largest)

    def is_close_to(self, other: "QuantizationLoss | None") -> bool:
        """Tell whether both are of the same experts and equal but for the order of fp32 sums."""
        if other is None or (self.experts, self.changed) != (other.experts, other.changed):
            return False
        return (
            math.isclose(self.squared_error, other.squared_error, rel_tol=1e-4)
            and math.isclose(self.squared, other.squared, rel_tol=1e-4)
            and math.isclose(self.largest, other.largest, rel_tol=1e-4)
        )


@dataclass
class ExportReport:
    """What an export did to the experts; its text is for a person."""

    losses: dict[str, QuantizationLoss] = field(default_factory=dict)
    """By tensor name; empty unless the export is MXFP4."""
    read_back: ReadBack | None = None
    """What was compared after it was written."""

    def add(self, name: str, loss: QuantizationLoss) -> None:
        """Take one more expert of the tensor ``name`` into account."""
        self.losses.setdefault(name, QuantizationLoss()).add(loss)

    def __str__(self) -> str:
        lines = [
            f"{name}: {loss.changed} of {loss.experts} experts quantized, relative error "
            f"{loss.relative:.3g}, largest {loss.largest:.3g}"
            for name, loss in self.losses.items()
            if loss.changed
        ]
        experts = sum(loss.experts for loss in self.losses.values())
        kept = experts - sum(loss.changed for loss in self.losses.values())
        lines.append(
            f"{kept} of {experts} expert matrices are byte for byte those of the reference"
        )
        return "\n".join(lines)


@dataclass
class MergeLoss:
    """What merged weights lost by being quantized."""

    values: int = 0
    """How many there are."""
    changed: int = 0
    """Values that MXFP4 cannot hold."""
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
        """Root mean square error over that of what the adapter adds; from 1 on, noise is larger."""
        return _root_of_ratio(self.squared_error, self.squared_update)

    def add(self, other: "MergeLoss") -> None:
        """Take further weights into account."""
        self.values += other.values
        self.changed += other.changed
        self.squared_error += other.squared_error
        self.squared += other.squared
        self.squared_update += other.squared_update

    def __str__(self) -> str:
        if self.squared_update == 0:
            of_the_update = "where the adapter adds nothing"
        else:
            of_the_update = f"{self.relative_to_update:.3g} of what the adapter adds"
        changed = self.changed / max(1, self.values)
        return f"relative error {self.relative:.3g}, {of_the_update}, {changed:.1%} of the values changed"


@dataclass
class UpdateLoss:
    """Loss of an adapter's update by rounding the merged weight."""

    squared_error: float = 0.0
    """Sum of (merged - base - update)**2."""
    squared_update: float = 0.0
    """Sum of update**2."""

    @property
    def relative(self) -> float:
        """Root mean square error over root mean square update."""
        return _root_of_ratio(self.squared_error, self.squared_update)

    def add(self, other: "UpdateLoss") -> None:
        """Take a further weight into account."""
        self.squared_error += other.squared_error
        self.squared_update += other.squared_update


@dataclass
class MergeReport:
    """Losses and warnings of a merge; its text is for a person."""

    layers: dict[int, MergeLoss] = field(default_factory=dict)
    """By layer; empty unless the merged model is MXFP4."""
    tensors: dict[str, MergeLoss] = field(default_factory=dict)
    """The same by tensor name."""
    updates: dict[str, UpdateLoss] = field(default_factory=dict, compare=False)
    """Loss by rounding, by the name of the parameter; empty for adapters that were trained here,
    whose trainer rounds the same way."""
    warnings: list[str] = field(default_factory=list, compare=False)
    """Checks that were not possible."""

    def add(self, layer: int, name: str, loss: MergeLoss) -> None:
        """Take one more expert of the tensor ``name`` into account."""
        self.layers.setdefault(layer, MergeLoss()).add(loss)
        self.tensors.setdefault(name, MergeLoss()).add(loss)

    def add_update(self, name: str, loss: UpdateLoss) -> None:
        """Take one more adapter of the parameter ``name`` into account."""
        self.updates.setdefault(name, UpdateLoss()).add(loss)

    def __str__(self) -> str:
        lines = [f"warning: {warning}" for warning in self.warnings]
        lines += self._quantization_lines()
        if self.updates:
            total = UpdateLoss()
            for update in self.updates.values():
                total.add(update)
            worst = max(self.updates, key=lambda name: self.updates[name].relative)
            lines.append(
                f"rounding the merged weights loses {total.relative:.1%} of the adapter's updates; "
                f"most of {worst}, {self.updates[worst].relative:.1%}"
            )
        elif not self.layers:
            lines.append("merged to the bits that the trainer multiplied with")
        return "\n".join(lines)

    def _quantization_lines(self) -> list[str]:
        if not self.layers:
            return []
        lines = [f"layer {layer}: {loss}" for layer, loss in self.layers.items()]
        worst = max(self.tensors, key=lambda name: self.tensors[name].relative)
        lines.append(f"worst tensor: {worst}, {self.tensors[worst]}")

        total = MergeLoss()
        for loss in self.layers.values():
            total.add(loss)
        lines.append(f"all experts: {total}")
        return lines


def _root_of_ratio(numerator: float, denominator: float) -> float:
    """Return 0 for 0 / 0, and infinity where something came out of nothing."""
    if numerator == 0:
        return 0.0
    if denominator == 0:
        return math.inf
    return math.sqrt(numerator / denominator)
