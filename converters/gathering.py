"""Bringing the weights of a running Megatron model to some of its ranks, as Hugging Face tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from converters.errors import ConversionError, GatheringBroken, GatheringRefused
from converters.gathering_plan import (
    GatheringPlan,
    GatheringPlanner,
    GatheringStep,
    Message,
    RankContents,
)
from converters.local_weights import LocalWeights
from converters.mapping import NamedParts, NamedTensor, ParameterMapping
from converters.mxfp4_tensors import Digests, packed_parts, split
from converters.names import stack_experts
from gptoss_kernels import mxfp4
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.model import chunks_of


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
        self.device = next(model.parameters()).device
        self.local = LocalWeights(model, config)
        self._dtype = chunks_of(model)[0].config.params_dtype

        # What ranks agree on goes through host memory: a GPU that is full has no room for it.
        self._agreement: Any = dist.group.WORLD
        if dist.get_backend() != "gloo":
            self._agreement = dist.new_group(backend="gloo")
            # NCCL allocates its buffers with the first message: now, and not when memory is short.
            dist.all_reduce(torch.zeros(1, device=self.device))

        own_contents = RankContents(
            dtypes=self.local.sent_dtypes(),
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        )
        self._planner = GatheringPlanner(
            config,
            ranks=self._gather_on_hosts(own_contents),
            tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
        )
        self._plans: dict[tuple[tuple[int, ...], bool], GatheringPlan] = {}

    def begin(
        self,
        receivers: Sequence[int] = (0,),
        *,
        transposed: bool = False,
        packed: bool = False,
        paced: bool = False,
    ) -> "GatheredWeights":
        """Begin to bring all weights to the global ranks ``receivers``. Collective.

        Args:
            receivers: who gets them.
            transposed: see ``names.hf_tensors``.
            packed: experts that are trained through MXFP4 come as blocks and scales, under the names
                of ``hf_layouts.mxfp4_shapes``, and not as the values that these stand for.
            paced: no rank sends anything before all have come to the same message; what it is to send it
                makes before. For a receiver that takes long over what it gets, such as one that writes it to
                a disk.

        Raises:
            GatheringRefused: on every rank, if one has no memory for its part.
        """
        buffer = None
        reason = ""
        try:
            plan = self.plan(tuple(receivers), packed=packed)
            buffer = torch.empty(plan.buffer_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:  # CUDA out of memory
            reason = f"rank {dist.get_rank()} has no memory for weights of others: {error}"

        # All ranks learn of it before the first message: whoever went on alone would wait for ever.
        for refusal in self._gather_on_hosts(reason):
            if refusal:
                raise GatheringRefused(refusal)
        assert buffer is not None
        return GatheredWeights(
            self, plan, buffer, transposed=transposed, packed=packed, paced=paced
        )

    def confirmed(self, weights: "GatheredWeights") -> Iterator[NamedTensor]:
        """Yield what ``weights`` yields, and fail at the end if any rank could not read its own
        weights: nonsense came in their place. Collective; every rank must run it to its end.

        Raises:
            ConversionError: on every rank, naming the rank and what kept it.
            GatheringBroken: if the ranks can exchange no more messages.
        """
        failure: Exception | None = None
        try:
            yield from weights
        except GatheringBroken:
            raise
        except Exception as error:
            failure = error

        # A receiver that had no use for its tensors has not met what kept it from its own.
        failure = failure or weights.failure
        reasons = self._gather_on_hosts("" if failure is None else str(failure) or repr(failure))
        for rank, reason in enumerate(reasons):
            if reason:
                raise ConversionError(f"rank {rank} could not read its weights: {reason}")

    def unpacked(self, joined: torch.Tensor) -> torch.Tensor:
        """Return the values of a parameter that came as MXFP4, in the model's dtype."""
        return mxfp4.dequantize(*split(joined)).to(self._dtype)

    def packed_digests(self) -> Digests:
        """Compute digests of all experts that are trained through MXFP4, the same on every rank.
        Collective.

        Raises:
            ConversionError: naming a matrix of which two ranks hold different copies.
        """
        digests: Digests = {}
        for rank_digests in self._gather_on_hosts(self.local.packed_digests()):
            for name, digest in rank_digests.items():
                if digests.setdefault(name, digest) != digest:
                    raise ConversionError(f"{name}: two ranks hold different copies")
        return digests

    def plan(self, receivers: tuple[int, ...], *, packed: bool) -> GatheringPlan:
        """Return the plan for some receivers, which is made once."""
        key = (receivers, packed)
        if key not in self._plans:
            self._plans[key] = self._planner.plan(receivers, packed=packed)
        return self._plans[key]

    def wait_for_all_ranks(self) -> None:
        """Wait until every rank is here. Collective; needs no GPU.

        Raises:
            GatheringBroken: if a rank has gone, or does not come within the timeout of the group.
        """
        try:
            dist.barrier(group=self._agreement)
        except Exception as error:
            raise GatheringBroken(
                f"rank {dist.get_rank()} waited for the others: {error}"
            ) from error

    def _gather_on_hosts[T](self, value: T) -> list[T]:
        """Return the value of every rank. Collective; needs no GPU."""
        if dist.get_world_size() == 1:
            return [value]
        everyone = [value] * dist.get_world_size()
        dist.all_gather_object(everyone, value, group=self._agreement)
        return everyone


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
        plan: GatheringPlan,
        buffer: torch.Tensor,
        *,
        transposed: bool,
        packed: bool,
        paced: bool,
    ) -> None:
        self._gathering = gathering
        self._receivers = plan.receivers
        self._buffer = buffer
        self._packed = packed
        self._is_receiver = dist.get_rank() in plan.receivers

        self._paced = paced

        # Shared by what assembles tensors and by ``finish``, which only exchanges messages.
        self._steps = iter(plan.steps)
        self._read_ahead: dict[str, torch.Tensor] = {}
        # A layer's experts as far as they have come, by Hugging Face name.
        self._stack: dict[str, torch.Tensor] = {}
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
            arrived = self._exchange(step)
            if self.failure is not None:
                raise self.failure

            if step.stack:
                came = [tensor for tensor in arrived if tensor is not None]
                if complete := self._add_to_stack(step, came):
                    yield replace(mapping, expert=None), complete
                continue

            # In the order of the tensor-parallel ranks, each [out / tensor, in] or [out, in /
            # tensor]. What every receiver holds itself was not sent.
            shards = []
            for shard in arrived:
                shards.append(self._read(mapping.name) if shard is None else shard)
            full = mapping.unshard(shards)
            if step.is_quantized:
                yield mapping, self._expert_parts(mapping, full)
                continue

            # The next parameter overwrites the buffer. Experts are copied into their stack at once.
            if mapping.expert is None and _shares_memory(full, self._buffer):
                full = full.clone()
            yield mapping, mapping.named_parts(full)

    def _add_to_stack(
        self, step: GatheringStep, arrived: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Put experts of a step to those of their layer. Returns all with the last, else nothing."""
        experts = self._gathering.config.num_experts
        if arrived:
            tensors = dict(zip(step.stack_names, arrived, strict=True))
        else:
            tensors = self._gathering.local.read_stack(step.stack, quantized=step.is_quantized)
            if len(step.stack) == experts:
                return tensors  # without another copy

        first = step.mapping.expert
        assert first is not None
        last = first + len(step.stack)
        if first == 0:
            self._stack = {
                name: tensor.new_empty(experts, *tensor.shape[1:])
                for name, tensor in tensors.items()
            }
        # The next step overwrites the buffer.
        for name, tensor in tensors.items():
            self._stack[name][first:last] = tensor
        if last < experts:
            return {}

        complete = self._stack
        self._stack = {}
        return complete

    def _read(self, name: str) -> torch.Tensor:
        """Return this rank's shard of a parameter as it is sent."""
        if name not in self._read_ahead:
            self._read_ahead.clear()  # before there is more
            self._read_ahead = self._gathering.local.read(name)
        return self._read_ahead.pop(name)

    def _expert_parts(
        self, mapping: ParameterMapping, joined: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the parts of an expert's matrix that came as MXFP4, as they are wanted."""
        if self._packed:
            return packed_parts(mapping, *split(joined))
        return mapping.named_parts(self._gathering.unpacked(joined))

    def _exchange(self, step: GatheringStep) -> list[torch.Tensor | None]:
        """Send or receive what a step brings. Returns it by message, None for shards that every
        receiver has itself.

        Raises nothing but GatheringBroken: a rank that left here would let others wait.
        """
        own = self._own_tensors(step)

        # NCCL posts a message without waiting for its receiver, and a kernel on the sender's GPU waits
        # until it is received. Its time limit runs meanwhile, and whatever else computes on that GPU,
        # such as a server's rank that loads what was received before, gets only every other time slice.
        if self._paced and any(message is not None for message in step.messages):
            self._gathering.wait_for_all_ranks()

        arrived: list[torch.Tensor | None] = []
        for number, message in enumerate(step.messages):
            if message is None:
                arrived.append(None)
                continue
            tensor = own.get(number)
            if tensor is None:
                tensor = message.room(self._buffer)
            self._send_or_receive(step.mapping.name, message, tensor)
            arrived.append(tensor)
        return arrived

    def _own_tensors(self, step: GatheringStep) -> dict[int, torch.Tensor]:
        """Return what this rank sends in a step, by the number of its message."""
        rank = dist.get_rank()
        numbers = [
            i for i, message in enumerate(step.messages) if message and message.source == rank
        ]
        if not numbers:
            return {}
        try:
            if not step.stack:
                # One: tensor-parallel shards come from as many ranks.
                return dict.fromkeys(numbers, self._read(step.mapping.name))
            stack = self._gathering.local.read_stack(step.stack, quantized=step.is_quantized)
            return dict(zip(numbers, stack.values(), strict=True))
        except Exception as error:
            # The others wait for something of this size. They get it, and this rank's failure keeps
            # it from being used.
            self.failure = self.failure or error
            return {}

    def _send_or_receive(self, name: str, message: Message, tensor: torch.Tensor) -> None:
        """Exchange ``tensor``, which holds what is sent, or has room for it."""
        rank = dist.get_rank()
        try:
            if len(self._receivers) > 1:
                dist.broadcast(tensor, src=message.source)
            elif rank == message.source:
                dist.send(tensor, dst=self._receivers[0])
            elif self._is_receiver:
                dist.recv(tensor, src=message.source)
        except Exception as error:
            raise GatheringBroken(f"rank {rank}, parameter {name}: {error}") from error


def _shares_memory(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
