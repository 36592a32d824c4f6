"""Which messages bring a model's weights to some of its ranks.

Pure functions of what every rank holds, so that all ranks come to the same plan without asking.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from converters.errors import ConversionError
from converters.mapping import ParameterMapping, Shape
from converters.mxfp4_tensors import joined_shape
from converters.names import parameter_mappings
from megatron_gptoss.config import ModelConfig


@dataclass(frozen=True)
class RankContents:
    """What one rank holds of the model."""

    dtypes: dict[str, torch.dtype]
    """By global parameter name; uint8 for one that is trained through MXFP4 and sent so."""
    tensor_rank: int
    """Its tensor-parallel rank."""

    def holds(self, mapping: ParameterMapping, shard: int | None) -> bool:
        """Return whether the rank has a shard of a parameter (None: all of it)."""
        return mapping.name in self.dtypes and shard in (None, self.tensor_rank)


@dataclass(frozen=True)
class Message:
    """One shard of a parameter on its way to the receivers."""

    source: int
    """The global rank that sends it."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Byte of a receiver's buffer where it begins."""

    @property
    def end(self) -> int:
        """The byte behind it at which any dtype may begin."""
        return self.offset + -(-self._bytes // 16) * 16

    @property
    def _bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def room(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return its place in a buffer."""
        place = buffer[self.offset : self.offset + self._bytes]
        return place.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class GatheringStep:
    """What is exchanged for one parameter."""

    mapping: ParameterMapping
    is_quantized: bool
    """Whether it is trained through MXFP4, and sent so."""
    messages: list[Message | None]
    """By tensor-parallel shard; None if every receiver has it."""
    stack: tuple[ParameterMapping, ...] = ()
    """At the first expert: all experts' counterparts, if every receiver has all of them."""


@dataclass(frozen=True)
class GatheringPlan:
    """All messages of a gathering, in their order."""

    receivers: tuple[int, ...]
    """Global ranks that get the weights."""
    steps: list[GatheringStep]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the largest step: what arrives of one parameter at a time."""
        ends = [message.end for step in self.steps for message in step.messages if message]
        return max(ends, default=0)


class GatheringPlanner:
    """Plans the messages for any receivers."""

    def __init__(
        self, config: ModelConfig, ranks: Sequence[RankContents], tensor_parallel: int
    ) -> None:
        """Remember who holds what.

        Args:
            config: of the model.
            ranks: what every rank holds, by global rank.
            tensor_parallel: into how many shards parameters are split.
        """
        self._config = config
        self._ranks = ranks
        self._tensor_parallel = tensor_parallel

    def plan(self, receivers: tuple[int, ...]) -> GatheringPlan:
        """Return all messages that bring the weights to the global ranks ``receivers``.

        Raises:
            ConversionError: naming a parameter of which no rank holds a part.
        """
        steps = []
        for mapping in parameter_mappings(self._config).values():
            is_quantized = self._is_quantized(mapping)
            messages = self._messages(mapping, is_quantized, receivers)
            steps.append(GatheringStep(mapping, is_quantized, messages))
        return GatheringPlan(receivers, self._mark_stacks(steps))

    def _mark_stacks(self, steps: list[GatheringStep]) -> list[GatheringStep]:
        """Mark the first expert of every stack that every receiver can read in one piece."""
        # Matrices that are not quantized go one by one: merged with adapters, they take room.
        experts = self._config.num_experts
        marked = list(steps)
        for i, step in enumerate(steps):
            mapping = step.mapping
            if mapping.expert != 0 or len(mapping.hf_names) != 1:
                continue
            stack = steps[i : i + experts]
            is_local = not any(message for one in stack for message in one.messages)
            if is_local and (step.is_quantized or len(mapping.shape) == 1):
                marked[i] = replace(step, stack=tuple(one.mapping for one in stack))
        return marked

    def _messages(
        self, mapping: ParameterMapping, is_quantized: bool, receivers: tuple[int, ...]
    ) -> list[Message | None]:
        """Return the message of each tensor-parallel shard, None where every receiver has it."""
        shards: list[int | None] = [None]
        if mapping.tensor_parallel_dim is not None:
            shards = list(range(self._tensor_parallel))

        messages: list[Message | None] = []
        offset = 0
        for shard in shards:
            if all(self._ranks[rank].holds(mapping, shard) for rank in receivers):
                messages.append(None)
                continue
            source = self._find_source(mapping, shard)
            message = Message(
                source=source,
                dtype=self._ranks[source].dtypes[mapping.name],
                shape=self._sent_shape(mapping, is_quantized),
                offset=offset,
            )
            messages.append(message)
            offset = message.end
        return messages

    def _is_quantized(self, mapping: ParameterMapping) -> bool:
        dtypes = (rank.dtypes.get(mapping.name) for rank in self._ranks)
        return torch.uint8 in dtypes

    def _sent_shape(self, mapping: ParameterMapping, is_quantized: bool) -> Shape:
        shape = mapping.local_shape(self._tensor_parallel)
        return joined_shape(shape) if is_quantized else shape

    def _find_source(self, mapping: ParameterMapping, shard: int | None) -> int:
        """Return the lowest rank that holds a shard."""
        # Data-parallel replicas hold the same; every rank must come to the same choice.
        for rank, contents in enumerate(self._ranks):
            if contents.holds(mapping, shard):
                return rank
        raise ConversionError(
            f"no rank holds part {shard or 0} of parameter {mapping.name}: the layout is broken"
        )
