"""Comparison of a Megatron checkpoint with a Hugging Face directory: tensors and outputs."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from converters.bits import require_finite
from converters.errors import ConversionError
from converters.families.registry import hugging_face_reference, tensors_of
from converters.hf_directory import HfDirectory
from converters.mapping import ParameterMapping
from converters.megatron_checkpoint import MegatronCheckpoint, check_same_model
from converters.names import hf_shapes, parameter_mappings
from converters.pipeline import Progress, ordered_map
from converters.reference.decoder import compare_stages

TOLERANCE = 1e-4
"""Of a layer's output, relative; fp32 sums in another order differ by about 1e-6, a wrong layout
by about 1."""
PIECE_ELEMENTS = 1 << 24
"""Elements that are compared at a time."""


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same on both sides."""

    name: str
    largest: float
    """Largest absolute difference of any two elements."""
    elements: int
    """How many elements differ."""


@dataclass
class VerifyReport:
    """What ``verify`` saw; its text is for a person."""

    tensors: int = 0
    """How many were compared."""
    differences: list[Difference] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    """Relative difference of the outputs of each stage: embedding, layer 0, ..., logits."""

    @property
    def first_stage(self) -> str | None:
        """The first stage whose outputs differ."""
        for stage, deviation in self.stages.items():
            # also true of nan, which "deviation > TOLERANCE" is not
            if not deviation <= TOLERANCE:
                return stage
        return None

    @property
    def equal(self) -> bool:
        return not self.differences and self.first_stage is None

    def __str__(self) -> str:
        lines = [f"all {self.tensors} tensors are equal bit for bit"]
        if self.differences:
            lines = [f"{len(self.differences)} of {self.tensors} tensors differ:"]
        for difference in self.differences:
            lines.append(
                f"  {difference.name}: {difference.elements} elements, largest difference "
                f"{difference.largest:.3g}"
            )

        if self.first_stage is None:
            worst = max(self.stages.values(), default=0.0)
            lines.append(
                f"outputs of every layer and logits agree: largest relative difference {worst:.2g}"
            )
        else:
            deviation = self.stages[self.first_stage]
            lines.append(
                f"outputs differ first in {self.first_stage}, by {deviation:.2g} of the largest "
                "value"
            )
        return "\n".join(lines)


def verify(hf_dir: Path, megatron_dir: Path, progress: Progress | None = None) -> VerifyReport:
    """Compare every tensor bit for bit and, layer by layer, what the two models compute.

    Where dtypes differ, tensors are compared as fp32. The name table pairs them. The outputs are
    computed without the table (``converters.reference``), so that a mistake in it shows.

    Raises:
        ConversionError: when either side cannot be read, or they are of different architectures.
    """
    source = HfDirectory(hf_dir)
    checkpoint = MegatronCheckpoint(megatron_dir)
    check_same_model(source, checkpoint.config, megatron_dir)

    differences = _compare_tensors(source, checkpoint, progress)
    family = tensors_of(checkpoint.config)
    megatron = family.megatron_layout(checkpoint.config, checkpoint.get)
    with torch.no_grad():
        stages = compare_stages(
            hugging_face_reference(source.config, source.get),
            family.reference(checkpoint.config, megatron),
        )
        return VerifyReport(len(hf_shapes(source.config)), differences, dict(stages))


def _compare_tensors(
    source: HfDirectory, checkpoint: MegatronCheckpoint, progress: Progress | None
) -> list[Difference]:
    def compare(mapping: ParameterMapping) -> list[Difference]:
        parts = mapping.named_parts(checkpoint.parameter(mapping))
        for name, part in parts.items():
            require_finite(part, name, checkpoint.path, mapping.expert)
        return [
            _difference(name, source.get(name, mapping.expert), part)
            for name, part in parts.items()
        ]

    table = list(parameter_mappings(source.config).values())
    results = ordered_map(
        compare, table, size=lambda mapping: mapping.bf16_bytes, progress=progress
    )
    by_name: dict[str, Difference] = {}
    with contextlib.closing(results):
        for differences in results:
            for difference in differences:
                if difference.elements:
                    _add_difference(by_name, difference)
    return list(by_name.values())


def _add_difference(by_name: dict[str, Difference], difference: Difference) -> None:
    """Add what differs in one expert to what differs in the others of its tensor."""
    name = difference.name
    before = by_name.get(name, Difference(name, largest=0.0, elements=0))
    by_name[name] = Difference(
        name,
        largest=max(before.largest, difference.largest),
        elements=before.elements + difference.elements,
    )


def _difference(name: str, expected: torch.Tensor, actual: torch.Tensor) -> Difference:
    if expected.shape != actual.shape:
        raise ConversionError(
            f"tensor {name} is {list(expected.shape)} on one side, "
            f"{list(actual.shape)} on the other"
        )

    largest = 0.0
    elements = 0
    expected_pieces = expected.contiguous().flatten().split(PIECE_ELEMENTS)
    actual_pieces = actual.contiguous().flatten().split(PIECE_ELEMENTS)
    for expected_piece, actual_piece in zip(expected_pieces, actual_pieces, strict=True):
        first = expected_piece.float()
        second = actual_piece.float()
        # As integers, so that the sign of zero and the bits of NaN count.
        differing = int((first.view(torch.int32) != second.view(torch.int32)).sum())
        if differing:
            elements += differing
            largest = max(largest, (first - second).abs().max().item())
    return Difference(name, largest, elements)
