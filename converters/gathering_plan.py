"""Plan of the messages that bring a model's weights to some of its ranks.

The plan is a pure function of all ranks' contents, so all ranks compute the same plan without
communication.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched, groupby, islice

import torch

from converters.errors import ConversionError
from converters.expert_adapters import factor_mappings, is_changed, is_factor
from converters.mapping import ParameterMapping, Shape
from converters.mxfp4_tensors import mxfp4_part_shapes, shape_with_scales, stored_names
from converters.names import parameter_mappings
from megatron_gptoss.config import AdapterConfig, ModelConfig

STACK_BYTES = 1 << 28
"""Maximum size of an expert stack in one message. Bounds the receive buffer."""


@dataclass(frozen=True)
class RankContents:
    """The parameters that one rank holds."""

    dtypes: dict[str, torch.dtype]
    """Dtype by global parameter name; uint8 for parameters that are sent as MXFP4."""
    tensor_rank: int
    """Tensor-parallel rank."""
    mxfp4_bases: frozenset[str] = frozenset()
    """Names of experts whose base is sent as MXFP4 to receivers that hold MXFP4. Their adapters are then sent, too."""

    def holds(self, mapping: ParameterMapping, shard: int | None) -> bool:
        """Return True if the rank has the shard of a parameter (None: all of it)."""
        # A parameter without shards (None) is whole on every rank that has it.
        return mapping.name in self.dtypes and shard in (None, self.tensor_rank)


@dataclass(frozen=True)
class ShardMessage:
    """One shard of a parameter, sent to the receivers."""

    source: int
    """Global rank of the sender."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """First byte of the shard in the receive buffer."""

    @property
    def end(self) -> int:
        """First byte behind the shard that is aligned for any dtype (16 bytes)."""
        # A view of the buffer must begin at a multiple of its dtype's size.
        return self.offset + -(-self._bytes // 16) * 16

    @property
    def _bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the view, with ``shape`` and ``dtype``, of ``buffer`` (uint8 [bytes])."""
        place = buffer[self.offset : self.offset + self._bytes]
        return place.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class WeightGatherStep:
    """Messages for one parameter, or for a stack of neighboring experts' parameters."""

    mapping: ParameterMapping
    """The parameter; of a stack, the first expert's."""
    is_quantized: bool
    """True if the parameter is sent as MXFP4."""
    messages: list[ShardMessage | None]
    """One message per tensor-parallel shard; None if every receiver has the shard.

    For a ``stack``: one message per Hugging Face tensor; empty if every receiver has the experts.
    """
    stack: tuple[ParameterMapping, ...] = ()
    """Parameters of neighboring experts that are sent together; empty for a single parameter."""

    @property
    def stack_names(self) -> tuple[str, ...]:
        """Stored names of the Hugging Face tensors in a stack, in the order of its messages."""
        (name,) = self.mapping.hf_names
        return stored_names(name) if self.is_quantized else (name,)


@dataclass(frozen=True)
class WeightGatherPlan:
    """All messages of a gathering, in order."""

    receivers: tuple[int, ...]
    """Global ranks that receive the weights."""
    steps: list[WeightGatherStep]

    @property
    def buffer_bytes(self) -> int:
        """Size of the largest step, which is the size of the receive buffer."""
        # Steps follow one another, so they can share one buffer.
        ends = [message.end for step in self.steps for message in step.messages if message]
        return max(ends, default=0)


class GatheringPlanner:
    """Plans the messages for any set of receivers."""

    def __init__(
        self,
        config: ModelConfig,
        ranks: Sequence[RankContents],
        tensor_parallel: int,
        adapter: AdapterConfig | None = None,
    ) -> None:
        """Create a planner.

        Args:
            config: model configuration.
            ranks: contents of every rank, by global rank.
            tensor_parallel: tensor-parallel size.
            adapter: settings of the adapters; None if all weights are trained.
        """
        self._config = config
        self._adapter = adapter
        self._ranks = ranks
        self._tensor_parallel = tensor_parallel

    def plan(
        self, receivers: tuple[int, ...], *, mxfp4_experts: bool, adapters_only: bool = False
    ) -> WeightGatherPlan:
        """Return all messages that bring the weights to ``receivers``.

        Args:
            receivers: global ranks.
            mxfp4_experts: whether receivers want MXFP4 experts as blocks and scales, and unmerged adapters.
            adapters_only: whether receivers have the weights that training does not change.

        Raises:
            ConversionError: naming a parameter of which a part is on no rank.
        """
        steps: list[WeightGatherStep] = []
        mappings = iter(self._sent(mxfp4_experts, adapters_only))
        for mapping in mappings:
            is_quantized = self._is_quantized(mapping, mxfp4_experts)
            if mxfp4_experts and self._is_stacked(mapping, is_quantized):
                # The same parameter of the other experts follows in the table.
                experts = [mapping, *islice(mappings, self._config.num_experts - 1)]
                steps += self._stack_steps(experts, is_quantized, receivers)
            else:
                messages = self._messages(mapping, is_quantized, receivers)
                steps.append(WeightGatherStep(mapping, is_quantized, messages))
        return WeightGatherPlan(receivers, steps)

    def _sent(self, mxfp4_experts: bool, adapters_only: bool) -> Iterator[ParameterMapping]:
        """Yield the parameters to send, and the factors of unmerged adapters if receivers take them."""
        for mapping in parameter_mappings(self._config).values():
            if not adapters_only or is_changed(mapping, self._unmerged_adapter()):
                yield mapping
        if mxfp4_experts and any(rank.mxfp4_bases for rank in self._ranks):
            rank = self._unmerged_adapter().rank_of_experts(self._config)
            yield from factor_mappings(self._config, rank)

    def _unmerged_adapter(self) -> AdapterConfig:
        """Return the settings of adapters that are not merged."""
        assert self._adapter is not None
        assert not self._adapter.merge_experts
        return self._adapter

    @staticmethod
    def _is_stacked(mapping: ParameterMapping, is_quantized: bool) -> bool:
        """Return True for the first of the experts whose parameters are sent together."""
        # Unquantized matrices are sent one by one: with merged adapters, they need memory.
        is_small = is_quantized or len(mapping.shape) == 1 or is_factor(mapping)
        return mapping.expert == 0 and len(mapping.hf_names) == 1 and is_small

    def _stack_steps(
        self,
        experts: Sequence[ParameterMapping],
        is_quantized: bool,
        receivers: tuple[int, ...],
    ) -> list[WeightGatherStep]:
        """Return the steps for one parameter of all experts.

        Neighbors with the same source share a step, and so do neighbors that all receivers have.
        """
        # About 40 kernels and messages per expert would take longer than the transfer itself.
        shapes = self._stacked_shapes(experts[0], is_quantized)
        # Ask for the first expert only, because experts do not differ in dtype.
        dtype = self._sent_dtype(experts[0], is_quantized, self._find_source(experts[0], None))
        expert_bytes = sum(map(math.prod, shapes)) * dtype.itemsize
        # At least 1, for experts that exceed the bound alone.
        most = max(1, STACK_BYTES // expert_bytes)

        steps: list[WeightGatherStep] = []
        # Consecutive experts lie on the same rank, because Megatron splits them in order.
        for source, group in groupby(experts, lambda one: self._sender(one, receivers)):
            neighbors = tuple(group)
            # No message: every receiver reads the experts from its own model.
            if source is None:
                steps.append(WeightGatherStep(neighbors[0], is_quantized, [], neighbors))
                continue
            # Several messages if the stack exceeds the receive buffer's bound.
            for some in batched(neighbors, most):
                messages: list[ShardMessage | None] = []
                offset = 0
                for shape in shapes:
                    message = ShardMessage(source, dtype, (len(some), *shape), offset)
                    messages.append(message)
                    offset = message.end
                steps.append(WeightGatherStep(some[0], is_quantized, messages, some))
        return steps

    def _sender(self, mapping: ParameterMapping, receivers: tuple[int, ...]) -> int | None:
        """Return the rank that sends a whole parameter; None if every receiver has it."""
        if all(self._ranks[rank].holds(mapping, None) for rank in receivers):
            return None
        return self._find_source(mapping, None)

    @staticmethod
    def _stacked_shapes(mapping: ParameterMapping, is_quantized: bool) -> list[Shape]:
        """Return the shapes of one expert's part of each Hugging Face tensor."""
        return mxfp4_part_shapes(mapping.shape) if is_quantized else [mapping.shape]

    def _messages(
        self, mapping: ParameterMapping, is_quantized: bool, receivers: tuple[int, ...]
    ) -> list[ShardMessage | None]:
        """Return the message of each tensor-parallel shard; None if every receiver has it."""
        shards: list[int | None] = [None]
        # Each shard is on other ranks, so each has its own source.
        if mapping.tensor_parallel_dim is not None:
            shards = list(range(self._tensor_parallel))

        messages: list[ShardMessage | None] = []
        offset = 0
        for shard in shards:
            if all(self._ranks[rank].holds(mapping, shard) for rank in receivers):
                messages.append(None)
                continue
            source = self._find_source(mapping, shard)
            message = ShardMessage(
                source=source,
                dtype=self._sent_dtype(mapping, is_quantized, source),
                shape=self._sent_shape(mapping, is_quantized),
                offset=offset,
            )
            messages.append(message)
            offset = message.end
        return messages

    def _is_quantized(self, mapping: ParameterMapping, mxfp4_experts: bool) -> bool:
        """Return True if the parameter is sent as MXFP4."""
        if mxfp4_experts and any(mapping.name in rank.mxfp4_bases for rank in self._ranks):
            return True
        # Only ranks that hold the parameter know whether it is trained through MXFP4.
        dtypes = (rank.dtypes.get(mapping.name) for rank in self._ranks)
        # ``LocalWeights.sent_dtypes`` marks MXFP4-trained experts with this dtype.
        return torch.uint8 in dtypes

    def _sent_dtype(
        self, mapping: ParameterMapping, is_quantized: bool, source: int
    ) -> torch.dtype:
        """Return the dtype in which the source sends the parameter."""
        return torch.uint8 if is_quantized else self._ranks[source].dtypes[mapping.name]

    def _sent_shape(self, mapping: ParameterMapping, is_quantized: bool) -> Shape:
        """Return the shape of one message, with scales if the parameter is MXFP4."""
        shape = mapping.local_shape(self._tensor_parallel)
        return shape_with_scales(shape) if is_quantized else shape

    def _find_source(self, mapping: ParameterMapping, shard: int | None) -> int:
        """Return the lowest global rank that holds a shard."""
        # Data-parallel replicas hold equal values. All ranks must make the same choice.
        for rank, contents in enumerate(self._ranks):
            if contents.holds(mapping, shard):
                return rank
        raise ConversionError(
            f"parameter {mapping.name}: no rank holds its tensor-parallel shard {shard or 0}, so the "
            "model does not have the layout of its process groups"
        )
