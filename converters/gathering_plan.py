"""Which messages bring a model's weights to some of its ranks.

Pure functions of what every rank holds, so that all ranks come to the same plan without asking.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched, groupby, islice

import torch

from converters.errors import ConversionError
from converters.mapping import ParameterMapping, Shape
from converters.mxfp4_tensors import joined_shape, packed_shapes, stored_names
from converters.names import parameter_mappings
from megatron_gptoss.config import ModelConfig

STACK_BYTES = 1 << 28
"""Of neighbouring experts that one message brings; a receiver has a buffer for them."""


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
    """What is exchanged for one parameter, or for that of neighbouring experts."""

    mapping: ParameterMapping
    """The parameter; of several experts the first one's."""
    is_quantized: bool
    """Whether it is trained through MXFP4, and sent so."""
    messages: list[Message | None]
    """By tensor-parallel shard; None if every receiver has it. Of a ``stack``: by Hugging Face
    tensor, none if every receiver has these experts."""
    stack: tuple[ParameterMapping, ...] = ()
    """The counterparts of neighbouring experts that are read, and sent, in one piece; empty for a
    parameter that goes by itself."""

    @property
    def stack_names(self) -> tuple[str, ...]:
        """The Hugging Face tensors that a stack is part of, in the order of its messages."""
        (name,) = self.mapping.hf_names
        return stored_names(name) if self.is_quantized else (name,)


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

    def plan(self, receivers: tuple[int, ...], *, packed: bool) -> GatheringPlan:
        """Return all messages that bring the weights to the global ranks ``receivers``.

        ``packed``: experts that are trained through MXFP4 are wanted as blocks and scales.

        Raises:
            ConversionError: naming a parameter of which no rank holds a part.
        """
        steps: list[GatheringStep] = []
        mappings = iter(parameter_mappings(self._config).values())
        for mapping in mappings:
            is_quantized = self._is_quantized(mapping)
            if packed and self._is_stacked(mapping, is_quantized):
                # The other experts' counterparts follow in the table.
                experts = [mapping, *islice(mappings, self._config.num_experts - 1)]
                steps += self._stack_steps(experts, is_quantized, receivers)
            else:
                messages = self._messages(mapping, is_quantized, receivers)
                steps.append(GatheringStep(mapping, is_quantized, messages))
        return GatheringPlan(receivers, steps)

    @staticmethod
    def _is_stacked(mapping: ParameterMapping, is_quantized: bool) -> bool:
        """Return whether this is the first of experts whose parameters go together."""
        # Matrices that are not quantized go one by one: merged with adapters, they take room.
        is_small = is_quantized or len(mapping.shape) == 1
        return mapping.expert == 0 and len(mapping.hf_names) == 1 and is_small

    def _stack_steps(
        self,
        experts: Sequence[ParameterMapping],
        is_quantized: bool,
        receivers: tuple[int, ...],
    ) -> list[GatheringStep]:
        """Return the steps of one parameter of all experts: a step for neighbours that have the same
        source, which sends them in one piece, or that every receiver has."""
        # Some forty kernels and messages for every expert take longer than the bytes do.
        shapes = self._stacked_shapes(experts[0], is_quantized)
        dtype = self._ranks[self._find_source(experts[0], None)].dtypes[experts[0].name]
        expert_bytes = sum(map(math.prod, shapes)) * dtype.itemsize
        most = max(1, STACK_BYTES // expert_bytes)

        steps: list[GatheringStep] = []
        for source, group in groupby(experts, lambda one: self._sender(one, receivers)):
            neighbours = tuple(group)
            if source is None:
                steps.append(GatheringStep(neighbours[0], is_quantized, [], neighbours))
                continue
            for some in batched(neighbours, most):
                messages: list[Message | None] = []
                offset = 0
                for shape in shapes:
                    message = Message(source, dtype, (len(some), *shape), offset)
                    messages.append(message)
                    offset = message.end
                steps.append(GatheringStep(some[0], is_quantized, messages, some))
        return steps

    def _sender(self, mapping: ParameterMapping, receivers: tuple[int, ...]) -> int | None:
        """Return the rank that sends a whole parameter, None if every receiver has it."""
        if all(self._ranks[rank].holds(mapping, None) for rank in receivers):
            return None
        return self._find_source(mapping, None)

    @staticmethod
    def _stacked_shapes(mapping: ParameterMapping, is_quantized: bool) -> list[Shape]:
        """Return the shapes of an expert's part of the Hugging Face tensors."""
        return packed_shapes(mapping.shape) if is_quantized else [mapping.shape]

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
