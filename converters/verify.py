"""Comparison of a Megatron checkpoint with a Hugging Face directory: tensors and outputs."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from converters.bits import require_finite
from converters.errors import ConversionError
from converters.families.registry import get_family_tensors, hugging_face_reference
from converters.hf_directory import HfDirectory
from converters.mapping import ParameterMapping
from converters.megatron_checkpoint import MegatronCheckpoint, check_same_model
from converters.names import hf_shapes, parameter_mappings
from converters.ordered_map import Progress, ordered_map
from converters.reference.decoder import compare_stages

TOLERANCE = 1e-4
"""Largest accepted relative difference of a layer's outputs.

Different orders of fp32 sums cause about 1e-6, a wrong layout about 1.
"""
PIECE_ELEMENTS = 1 << 24
"""Elements compared at a time, to bound memory."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor whose values differ between the two sides."""

    name: str
    largest: float
    """Largest absolute difference of two elements."""
    elements: int
    """Number of elements that differ."""


@dataclass
class VerifyReport:
    """Result of ``verify``. ``str`` gives a text for the user."""

    tensors: int = 0
    """Number of tensors compared."""
    differences: list[TensorDifference] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    """Relative difference in each stage's outputs: embedding, layer 0, ..., logits."""

    @property
    def first_stage(self) -> str | None:
        """First stage whose outputs differ; None if all agree."""
        for stage, deviation in self.stages.items():
            # nan fails this comparison, too. It would pass "deviation > TOLERANCE".
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
    """Compare all tensors bit for bit, and the outputs of all layers within ``TOLERANCE``.

    Tensors of different dtypes are compared as fp32. The name table pairs the tensors. The outputs
    are computed without the table (``converters.reference``), to reveal mistakes in the table.

    Args:
        hf_dir: Hugging Face directory.
        megatron_dir: torch_dist checkpoint.
        progress: callback that receives the progress.

    Raises:
        ConversionError: if a side cannot be read, or if the architectures differ.
    """
    source = HfDirectory(hf_dir)
    checkpoint = MegatronCheckpoint(megatron_dir)
    check_same_model(source, checkpoint.config, megatron_dir)

    differences = _compare_tensors(source, checkpoint, progress)

    # Equal tensors show only that the table is invertible. Equal outputs show that it is right.
    family = get_family_tensors(checkpoint.config)
    # Reads by key and index, without the name table that is under test.
    megatron = family.megatron_layout(checkpoint.config, checkpoint.get)
    with torch.no_grad():
        stages = compare_stages(
            hugging_face_reference(source.config, source.get),
            family.reference(checkpoint.config, megatron),
        )
        return VerifyReport(len(hf_shapes(source.config)), differences, dict(stages))


def _compare_tensors(
    source: HfDirectory, checkpoint: MegatronCheckpoint, progress: Progress | None
) -> list[TensorDifference]:
    """Compare all parameters, and return the tensors that differ."""

    def compare(mapping: ParameterMapping) -> list[TensorDifference]:
        """Return the difference of each of the parameter's tensors."""
        parts = mapping.named_parts(checkpoint.parameter(mapping))
        for name, part in parts.items():
            # NaN would be equal on both sides and give no useful output.
            require_finite(part, name, checkpoint.path, mapping.expert)
        return [
            _difference(name, source.get(name, mapping.expert), part)
            for name, part in parts.items()
        ]

    mappings = list(parameter_mappings(source.config).values())
    results = ordered_map(
        compare, mappings, size=lambda mapping: mapping.bf16_bytes, progress=progress
    )
    by_name: dict[str, TensorDifference] = {}
    with contextlib.closing(results):
        for differences in results:
            for difference in differences:
                if difference.elements:
                    _add_difference(by_name, difference)
    return list(by_name.values())


def _add_difference(by_name: dict[str, TensorDifference], difference: TensorDifference) -> None:
    """Add the difference of one expert to the differences of its tensor."""
    name = difference.name
    before = by_name.get(name, TensorDifference(name, largest=0.0, elements=0))
    by_name[name] = TensorDifference(
        name,
        largest=max(before.largest, difference.largest),
        elements=before.elements + difference.elements,
    )


def _difference(name: str, expected: torch.Tensor, actual: torch.Tensor) -> TensorDifference:
    """Compare two tensors bit by bit, as fp32."""
    # Pieces of different shapes would pair unrelated elements.
    if expected.shape != actual.shape:
        raise ConversionError(
            f"tensor {name} has shape {list(expected.shape)} in the Hugging Face directory and "
            f"{list(actual.shape)} in the checkpoint. Compare two forms of one model"
        )

    largest = 0.0
    elements = 0
    # Flatten both the same way, because one may be a transposed view.
    expected_pieces = expected.contiguous().flatten().split(PIECE_ELEMENTS)
    actual_pieces = actual.contiguous().flatten().split(PIECE_ELEMENTS)
    for expected_piece, actual_piece in zip(expected_pieces, actual_pieces, strict=True):
        first = expected_piece.float()
        second = actual_piece.float()
        # Compare as integers, to include the sign of zero and the bits of NaN.
        differing = int((first.view(torch.int32) != second.view(torch.int32)).sum())
        if differing:
            elements += differing
            largest = max(largest, (first - second).abs().max().item())
    return TensorDifference(name, largest, elements)
