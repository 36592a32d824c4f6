"""Is a Megatron checkpoint the model of a Hugging Face directory? Every tensor, and the logits of a few tokens."""

import contextlib
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from converters.errors import ConversionError
from converters.forward import HuggingFaceSide, MegatronSide, deviations
from converters.hf_directory import HfDirectory
from converters.megatron_checkpoint import MegatronCheckpoint, check_same_model
from converters.names import ParameterMapping, hf_shapes, parameter_mappings
from converters.pipeline import Progress, bf16_bytes, in_order

TOLERANCE = 1e-4
"""Of a layer's output, relative; fp32 sums in another order differ by about 1e-6, a wrong layout by about 1."""
ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same on both sides."""

    name: str
    largest: float
    """Largest absolute difference of any two elements; nan if either side has one."""
    elements: int
    """How many elements differ."""


@dataclass
class VerifyReport:
    """What ``verify`` found; printing it is the answer for a person."""

    tensors: int = 0
    differences: list[Difference] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    """Per stage of the network (embedding, layer 0, ..., logits) the relative difference of the outputs."""

    @property
    def first_stage(self) -> str | None:
        """The first whose outputs differ."""
        return next((stage for stage, value in self.stages.items() if not value <= TOLERANCE), None)

    @property
    def equal(self) -> bool:
        return not self.differences and self.first_stage is None

    def __str__(self) -> str:
        lines = [f"all {self.tensors} tensors are equal bit for bit"]
        if self.differences:
            lines = [f"{len(self.differences)} of {self.tensors} tensors differ:"]
        lines += [f"  {d.name}: {d.elements} elements, largest difference {d.largest:.3g}" for d in self.differences]
        if self.first_stage is None:
            worst = max(self.stages.values(), default=0.0)
            lines.append(f"outputs of every layer and logits agree: largest relative difference {worst:.2g}")
        else:
            value = self.stages[self.first_stage]
            lines.append(f"outputs differ first in {self.first_stage}, by {value:.2g} of the largest value")
        return "\n".join(lines)


def verify(hf_dir: Path, megatron_dir: Path, progress: Progress | None = None) -> VerifyReport:
    """Compare every tensor bit for bit (as fp32 where dtypes differ) and, layer by layer, what the two models compute.

    The tensors are brought together by the name table; the outputs are computed without it (see ``forward``), so that a
    mistake in the table itself shows. Raises ConversionError when either side cannot be read or they are of different
    architectures."""
    source, checkpoint = HfDirectory(hf_dir), MegatronCheckpoint(megatron_dir)
    check_same_model(source, checkpoint.config, megatron_dir)
    table = list(parameter_mappings(source.config).values())
    found: dict[str, Difference] = {}

    def compare(mapping: ParameterMapping) -> list[Difference]:
        parts = mapping.named_parts(checkpoint.parameter(mapping))
        return [_difference(name, source.get(name, mapping.expert), part) for name, part in parts.items()]

    with contextlib.closing(in_order(compare, table, bf16_bytes, progress)) as results:
        for differences in results:
            for d in differences:
                if d.elements:
                    before = found.get(d.name, Difference(d.name, 0.0, 0))
                    found[d.name] = Difference(d.name, max(before.largest, d.largest), before.elements + d.elements)
    megatron = MegatronSide(checkpoint.config, checkpoint.get)
    with torch.no_grad():
        stages = dict(deviations(source.config, HuggingFaceSide(source.config, source.get), megatron))
    return VerifyReport(len(hf_shapes(source.config)), list(found.values()), stages)


def _difference(name: str, expected: torch.Tensor, actual: torch.Tensor) -> Difference:
    if expected.shape != actual.shape:
        raise ConversionError(f"tensor {name} is {list(expected.shape)} on one side, {list(actual.shape)} on the other")
    largest, elements = 0.0, 0
    both = (part.contiguous().flatten().split(ELEMENTS) for part in (expected, actual))
    for ours, theirs in zip(*both, strict=True):
        ours, theirs = ours.float(), theirs.float()
        different = int((ours.view(torch.int32) != theirs.view(torch.int32)).sum())
        if different:
            elements += different
            largest = max(largest, (ours - theirs).abs().max().item(), key=lambda x: math.inf if math.isnan(x) else x)
    return Difference(name, largest, elements)
