"""Weights of a running Megatron model: filling it from Hugging Face tensors and reading it out.

Both work on this rank's part of the model under any tensor, pipeline, expert and data parallel
layout (expert tensor parallel size 1), with the groups of ``megatron.core.parallel_state``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from converters.errors import ConversionError, GatheringBroken, GatheringRefused
from converters.hf_directory import ExpertStack
from converters.mapping import NamedParts, NamedTensor, ParameterMapping, Shape
from converters.mxfp4_tensors import (
    Digests,
    join,
    joined_shape,
    matrices_at_once,
    matrix_digest,
    matrix_name,
    pack_stack,
    packed_parts,
    row_order,
    split,
    stacked_in_bf16,
)
from converters.names import global_name, parameter_mappings, stack_experts
from gptoss_kernels import mxfp4
from megatron_gptoss.checkpoint.base_digest import local_digest
from megatron_gptoss.checkpoint.state import has_adapters
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.model import chunks_of
from megatron_gptoss.weights import QuantizedWeight, Weight, named_weights

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"

GetTensor = Callable[[str], torch.Tensor] | Callable[[str], torch.Tensor | ExpertStack]


# -- loading -----------------------------------------------------------------------------------


@torch.no_grad()
def load_hf_weights(model: torch.nn.Module, config: ModelConfig, get_tensor: GetTensor) -> None:
    """Fill every weight of this rank's ``model`` in place. Not collective.

    Adapters stay as they are: what is loaded is their base.

    Args:
        model: of any parallel layout; other dtypes are converted to the parameter's.
        config: of the model.
        get_tensor: returns the Hugging Face tensor of a name. Called only for names of which this
            rank holds a part; if it answers with an ExpertStack, only this rank's experts are read.

    Raises:
        ConversionError: (a ValueError) naming the tensor when it is missing or has another shape,
            or when the model has a parameter that the name table does not know, or one that holds
            MXFP4 values only and would change.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    tensors: dict[str, torch.Tensor | ExpertStack] = {}

    # In the table, experts that share a tensor follow one another: one read serves all.
    for mapping, weight in _local_weights(model, config):
        if any(name not in tensors for name in mapping.hf_names):
            tensors = _get_tensors(mapping, get_tensor)
        parts = _parts(mapping, tensors, config.num_experts)

        # The full parameter exists for a moment: only experts are large, and they are not split.
        local = mapping.shard(mapping.to_megatron(*parts), group.rank(), group.size())
        if local.shape != weight.shape:
            raise ConversionError(
                f"parameter {mapping.name} has shape {list(weight.shape)} on this rank, but its "
                f"share of {', '.join(mapping.hf_names)} has {list(local.shape)}: model and "
                "configuration differ"
            )
        try:
            weight.load(local)
        except ValueError as error:
            raise ConversionError(f"parameter {mapping.name}: {error}") from None

    # Checkpoints of adapters say which base they change. It is read now, and not in the first save.
    if has_adapters(model):
        local_digest(model)


def _get_tensors(
    mapping: ParameterMapping, get_tensor: GetTensor
) -> dict[str, torch.Tensor | ExpertStack]:
    try:
        return {name: get_tensor(name) for name in mapping.hf_names}
    except KeyError as error:
        raise ConversionError(
            f"tensor {error.args[0]} is missing from the weights to load"
        ) from None


def _parts(
    mapping: ParameterMapping, tensors: dict[str, torch.Tensor | ExpertStack], num_experts: int
) -> list[Any]:
    """Take a parameter's parts from the tensors, checking the shapes of these."""
    parts: list[Any] = []
    for name, shape in zip(mapping.hf_names, mapping.part_shapes, strict=True):
        tensor = tensors[name]
        expected = shape if mapping.expert is None else (num_experts, *shape)
        if tuple(tensor.shape) != expected:
            raise ConversionError(
                f"tensor {name} has shape {list(tensor.shape)}, but the model configuration says "
                f"{list(expected)}"
            )
        if mapping.expert is None:
            parts.append(tensor)
        else:
            parts.append(tensor[mapping.expert])
    return parts


def _local_weights(
    model: torch.nn.Module, config: ModelConfig
) -> list[tuple[ParameterMapping, Weight]]:
    """Return what this rank holds, in the order of the name table."""
    table = parameter_mappings(config)
    experts = config.num_experts // parallel_state.get_expert_model_parallel_world_size()
    first_expert = experts * parallel_state.get_expert_model_parallel_rank()

    local = {}
    for chunk in chunks_of(model):
        first_layer = chunk.decoder.layers[0].layer_number - 1  # Megatron counts from 1
        for name, weight in named_weights(chunk):
            full_name = global_name(name, first_layer, first_expert)
            if config.tied_embeddings and full_name == OUTPUT_LAYER:
                # The copy of the embedding on a last pipeline stage.
                full_name = EMBEDDING
            if full_name not in table:
                raise ConversionError(
                    f"parameter {name} ({full_name} of the whole model) has no counterpart in "
                    f"Hugging Face's {config.model_type} of {config.num_layers} layers and "
                    f"{config.num_experts} experts"
                )
            local[full_name] = weight
    return [(mapping, local[name]) for name, mapping in table.items() if name in local]


# -- reading out -------------------------------------------------------------------------------


def export_hf_weights(
    model: torch.nn.Module, config: ModelConfig, transposed: bool = False
) -> "GatheredWeights":
    """Return all Hugging Face tensors of the model, on global rank 0, in the order of ``hf_shapes``.

    Weights with adapters are merged, and those that are trained through MXFP4 rounded to it, one
    after the other.

    Collective: every rank must run the iterator to its end, or call ``finish``; on other ranks
    than 0 it yields nothing.

    Args:
        model: of any parallel layout.
        config: of the model.
        transposed: see ``names.hf_tensors``.
    """
    return WeightGathering(model, config).begin(transposed=transposed)


@dataclass(frozen=True)
class _RankContents:
    """What one rank holds of the model."""

    dtypes: dict[str, torch.dtype]
    """By global parameter name; uint8 for one that is trained through MXFP4 and sent so."""
    tp_rank: int


class WeightGathering:
    """Brings a model's weights, as Hugging Face tensors, to some of its ranks.

    Every rank has one, made at the same time. No failure of one rank leaves others waiting in the
    middle: what a rank needs for its messages is there before the first, and after a failure it
    goes on with its messages (``GatheredWeights``).
    """

    def __init__(self, model: torch.nn.Module, config: ModelConfig) -> None:
        """Tell all ranks what this one holds. Collective.

        Args:
            model: of any parallel layout.
            config: of the model.
        """
        self.config = config
        self.tp_size = parallel_state.get_tensor_model_parallel_world_size()
        self.device = next(model.parameters()).device
        local = _local_weights(model, config)
        self._weights = {mapping.name: weight for mapping, weight in local}
        self._own_mappings = [mapping for mapping, _ in local]
        self._places = {mapping.name: i for i, mapping in enumerate(self._own_mappings)}
        self._dtype = chunks_of(model)[0].config.params_dtype

        # What ranks agree on goes through host memory: a GPU that is full has no room for it.
        self._agreement: Any = dist.group.WORLD
        if dist.get_backend() != "gloo":
            self._agreement = dist.new_group(backend="gloo")
            # NCCL allocates its buffers with the first message: now, and not when memory is short.
            dist.all_reduce(torch.zeros(1, device=self.device))
        self._ranks = self._gather_contents()
        self._plans: dict[tuple[int, ...], _GatheringPlan] = {}

    def begin(
        self,
        receivers: Sequence[int] = (0,),
        *,
        transposed: bool = False,
        packed: bool = False,
    ) -> "GatheredWeights":
        """Begin to bring all weights to the global ranks ``receivers``. Collective.

        Args:
            receivers: who gets them.
            transposed: see ``names.hf_tensors``.
            packed: experts that are trained through MXFP4 come as blocks and scales, under the names
                of ``hf_layouts.mxfp4_shapes``, and not as the values that these stand for.

        Raises:
            GatheringRefused: on every rank, if one has no memory for its part.
        """
        buffer = None
        reason = ""
        try:
            plan = self.plan(tuple(receivers))
            buffer = torch.empty(plan.buffer_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:  # CUDA out of memory
            reason = f"rank {dist.get_rank()} has no memory for weights of others: {error}"

        for refusal in self._gather_on_hosts(reason):
            if refusal:
                raise GatheringRefused(refusal)
        assert buffer is not None
        return GatheredWeights(self, plan, buffer, transposed=transposed, packed=packed)

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Return this rank's shard of a parameter as it is sent; it may share the parameter's
        memory.

        Experts that are trained through MXFP4 are quantized several at once: those of this rank
        that follow in the order of the table come with it.
        """
        if not isinstance(self._weights[name], QuantizedWeight):
            return {name: self._weights[name].read().contiguous()}

        first = self._places[name]
        last = first + matrices_at_once(self._weights[name].shape)
        names = []
        for mapping in self._own_mappings[first:last]:
            if mapping.hf_names == self._own_mappings[first].hf_names:
                names.append(mapping.name)
        joined = join(*mxfp4.quantize(stacked_in_bf16(self._unrounded(names))))
        return dict(zip(names, joined, strict=True))

    def _unrounded(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the weights of experts that are trained through MXFP4."""
        unrounded = []
        for name in names:
            weight = self._weights[name]
            assert isinstance(weight, QuantizedWeight)
            unrounded.append(weight.unrounded())
        return unrounded

    def read_stack(self, mappings: Sequence[ParameterMapping]) -> dict[str, torch.Tensor]:
        """Return complete Hugging Face tensors of all experts, every one of which is on this rank.

        A GPU gets a handful of kernels, and not some for every expert.

        Args:
            mappings: of one matrix or bias of each expert, in order.
        """
        names = [mapping.name for mapping in mappings]
        if self.is_packed(mappings[0]):
            return pack_stack(mappings[0], self._unrounded(names))

        stack = torch.stack([self._weights[name].read() for name in names])
        order = row_order(mappings[0], stack.device)
        return {mappings[0].hf_names[0]: stack[:, order]}

    def is_packed(self, mapping: ParameterMapping) -> bool:
        """Return whether a parameter is sent as MXFP4."""
        dtypes = (rank.dtypes.get(mapping.name) for rank in self._ranks)
        return torch.uint8 in dtypes

    def unpacked(self, joined: torch.Tensor) -> torch.Tensor:
        """Return the values of a parameter that came as MXFP4, in the model's dtype."""
        return mxfp4.dequantize(*split(joined)).to(self._dtype)

    def packed_digests(self) -> Digests:
        """Compute digests of all experts that are trained through MXFP4, the same on every rank.
        Collective.

        Raises:
            ConversionError: naming a matrix of which two ranks hold different copies.
        """
        own: Digests = {}
        for mapping in self._own_mappings:
            weight = self._weights[mapping.name]
            if isinstance(weight, QuantizedWeight):
                assert mapping.expert is not None
                blocks, scales = packed_parts(mapping, *weight.read_packed()).values()
                name = matrix_name(mapping.hf_names[0], mapping.expert)
                own[name] = matrix_digest(blocks, scales)

        digests: Digests = {}
        for theirs in self._gather_on_hosts(own):
            for name, digest in theirs.items():
                if digests.setdefault(name, digest) != digest:
                    raise ConversionError(f"{name}: two ranks hold different copies")
        return digests

    # -- which messages there are -----------------------------------------------------------------

    def plan(self, receivers: tuple[int, ...]) -> "_GatheringPlan":
        """Return all messages that bring the weights to some ranks; the same on every rank."""
        if receivers not in self._plans:
            steps = [
                _GatheringStep(mapping, self._messages(mapping, receivers))
                for mapping in parameter_mappings(self.config).values()
            ]
            self._plans[receivers] = _GatheringPlan(receivers, self._find_stacks(steps))
        return self._plans[receivers]

    def _find_stacks(self, steps: list["_GatheringStep"]) -> list["_GatheringStep"]:
        """Mark the first expert of every stack that every receiver can read in one piece."""
        # Matrices that are not quantized go one by one: merged with adapters, they take room.
        experts = self.config.num_experts
        marked = list(steps)
        for i, step in enumerate(steps):
            mapping = step.mapping
            if mapping.expert != 0 or len(mapping.hf_names) != 1:
                continue
            stack = steps[i : i + experts]
            is_local = not any(message for one in stack for message in one.messages)
            if is_local and (self.is_packed(mapping) or len(mapping.shape) == 1):
                marked[i] = replace(step, stack=tuple(one.mapping for one in stack))
        return marked

    def _messages(
        self, mapping: ParameterMapping, receivers: tuple[int, ...]
    ) -> list["_Message | None"]:
        shards: list[int | None] = [None]
        if mapping.tensor_parallel_dim is not None:
            shards = list(range(self.tp_size))

        messages: list[_Message | None] = []
        offset = 0
        for shard in shards:
            if all(self._holds(mapping, shard, rank) for rank in receivers):
                messages.append(None)
                continue
            source = self._source(mapping, shard)
            message = _Message(
                source=source,
                dtype=self._ranks[source].dtypes[mapping.name],
                shape=self._sent_shape(mapping),
                offset=offset,
            )
            messages.append(message)
            offset = message.end
        return messages

    def _sent_shape(self, mapping: ParameterMapping) -> Shape:
        shape = mapping.local_shape(self.tp_size)
        return joined_shape(shape) if self.is_packed(mapping) else shape

    def _holds(self, mapping: ParameterMapping, shard: int | None, rank: int) -> bool:
        """Whether ``rank`` has a shard of the parameter (None: all of it)."""
        contents = self._ranks[rank]
        return mapping.name in contents.dtypes and shard in (None, contents.tp_rank)

    def _source(self, mapping: ParameterMapping, shard: int | None) -> int:
        """Return the lowest rank that holds a shard."""
        # Data-parallel replicas hold the same; every rank must come to the same choice.
        for rank in range(len(self._ranks)):
            if self._holds(mapping, shard, rank):
                return rank
        raise ConversionError(
            f"no rank holds part {shard or 0} of parameter {mapping.name}: the layout is broken"
        )

    # -- what all ranks agree on ------------------------------------------------------------------

    def _gather_contents(self) -> list[_RankContents]:
        """Return what every rank holds, by global rank. Collective."""
        # dtypes differ within a model: the router's bias stays fp32.
        contents = _RankContents(
            dtypes={name: _sent_dtype(weight) for name, weight in self._weights.items()},
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        )
        return self._gather_on_hosts(contents)

    def _gather_on_hosts[T](self, value: T) -> list[T]:
        """Return the value of every rank. Collective; needs no GPU."""
        if dist.get_world_size() == 1:
            return [value]
        everyone = [value] * dist.get_world_size()
        dist.all_gather_object(everyone, value, group=self._agreement)
        return everyone


def _sent_dtype(weight: Weight) -> torch.dtype:
    return torch.uint8 if isinstance(weight, QuantizedWeight) else weight.dtype


@dataclass(frozen=True)
class _Message:
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
class _GatheringStep:
    """What is exchanged for one parameter."""

    mapping: ParameterMapping
    messages: list[_Message | None]
    """By tensor-parallel shard; None if every receiver has it."""
    stack: tuple[ParameterMapping, ...] = ()
    """At the first expert: all experts' counterparts, if every receiver has all of them."""


@dataclass(frozen=True)
class _GatheringPlan:
    """All messages of a gathering, in their order."""

    receivers: tuple[int, ...]
    steps: list[_GatheringStep]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the largest step: what arrives of one parameter at a time."""
        ends = [message.end for step in self.steps for message in step.messages if message]
        return max(ends, default=0)


class GatheredWeights(Iterator[NamedTensor]):
    """Yields all Hugging Face tensors of the model on the receiving ranks, in the order of
    ``hf_shapes``; on others it yields nothing.

    Collective: every rank must run it to its end, or call ``finish``. If something fails between
    two messages, such as the memory for a tensor, this rank takes part in those that are left
    before it raises. One receiver gets each byte once; several get it by broadcasts.

    A receiver holds one Hugging Face tensor at a time (of a layer's experts, the stack of all)
    besides its own weights. dtype and device are the parameter's: of a bf16 model the router's bias
    comes in fp32. A yielded tensor may share memory with a parameter: copy it to keep it beyond the
    next optimizer step.
    """

    def __init__(
        self,
        gathering: WeightGathering,
        plan: _GatheringPlan,
        buffer: torch.Tensor,
        *,
        transposed: bool,
        packed: bool,
    ) -> None:
        self._gathering = gathering
        self._receivers = plan.receivers
        self._buffer = buffer
        self._packed = packed
        self._is_receiver = dist.get_rank() in plan.receivers

        # Shared by what assembles tensors and by ``finish``, which only exchanges messages.
        self._steps = iter(plan.steps)
        self._read_ahead: dict[str, torch.Tensor] = {}
        self.failure: Exception | None = None
        """What kept this rank from reading its own weights. The others got nonsense instead, so
        whoever runs this must look at it when all messages are through."""
        self._assembled = stack_experts(
            gathering.config, self._received_parts(), transposed=transposed and not packed
        )

    @torch.no_grad()
    def __next__(self) -> NamedTensor:
        if not self._is_receiver:
            self.finish()
            if self.failure is not None:
                raise self.failure
            raise StopIteration
        try:
            return next(self._assembled)
        except (StopIteration, GatheringBroken):
            raise
        except Exception:
            self.finish()
            raise

    @torch.no_grad()
    def finish(self) -> None:
        """Take part in the messages that are left, and drop what they bring."""
        for step in self._steps:
            self._exchange(step)

    def _received_parts(self) -> Iterator[NamedParts]:
        for step in self._steps:
            mapping = step.mapping
            if self._packed and step.stack:
                for _ in step.stack[1:]:
                    next(self._steps)  # without messages
                complete = replace(mapping, expert=None)
                yield complete, self._gathering.read_stack(step.stack)
                continue

            arrived = self._exchange(step)
            if self.failure is not None:
                raise self.failure

            shards = []
            for shard in arrived:
                shards.append(self._read(mapping.name) if shard is None else shard)
            full = mapping.unshard(shards)
            if self._gathering.is_packed(mapping):
                yield mapping, self._expert_parts(mapping, full)
                continue

            # The next parameter overwrites the buffer. Experts are copied into their stack at once.
            if mapping.expert is None and _shares_memory(full, self._buffer):
                full = full.clone()
            yield mapping, mapping.named_parts(full)

    def _read(self, name: str) -> torch.Tensor:
        """Return this rank's shard of a parameter as it is sent."""
        if name not in self._read_ahead:
            self._read_ahead.clear()  # before there is more
            self._read_ahead = self._gathering.read(name)
        return self._read_ahead.pop(name)

    def _expert_parts(
        self, mapping: ParameterMapping, joined: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the parts of an expert's matrix that came as MXFP4, as they are wanted."""
        if self._packed:
            return packed_parts(mapping, *split(joined))
        return mapping.named_parts(self._gathering.unpacked(joined))

    def _exchange(self, step: _GatheringStep) -> list[torch.Tensor | None]:
        """Send or receive the shards of one parameter. Returns them, None for those that every
        receiver has itself.

        Raises nothing but GatheringBroken: a rank that left here would let others wait.
        """
        arrived: list[torch.Tensor | None] = []
        for message in step.messages:
            if message is None:
                arrived.append(None)
            else:
                arrived.append(self._send_or_receive(step.mapping.name, message))
        return arrived

    def _send_or_receive(self, name: str, message: _Message) -> torch.Tensor:
        """Exchange one shard, which arrives in the buffer where it is not at hand already."""
        rank = dist.get_rank()
        tensor = message.room(self._buffer)
        if rank == message.source:
            try:
                tensor = self._read(name)
            except Exception as error:
                # The others wait for something of this size. They get it, and this rank's failure
                # keeps it from being used.
                self.failure = self.failure or error

        try:
            if len(self._receivers) > 1:
                dist.broadcast(tensor, src=message.source)
            elif rank == message.source:
                dist.send(tensor, dst=self._receivers[0])
            elif self._is_receiver:
                dist.recv(tensor, src=message.source)
        except Exception as error:
            raise GatheringBroken(f"rank {rank}, parameter {name}: {error}") from error
        return tensor


def _shares_memory(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
