"""Gathering of a running Megatron model's weights on some of its ranks, as Hugging Face tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from converters.errors import ConversionError, GatheringAbortedError, GatheringError
from converters.gathering_plan import (
    GatheringPlanner,
    RankContents,
    ShardMessage,
    WeightGatherPlan,
    WeightGatherStep,
)
from converters.local_weights import LocalWeights
from converters.mapping import NamedParts, NamedTensor, ParameterMapping
from converters.mxfp4_tensors import Digests, mxfp4_parts, separate_scales
from converters.names import stack_experts
from gptoss_kernels import mxfp4
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.model import list_chunks


class WeightGathering:
    """Gathers a model's weights on some of its ranks, as Hugging Face tensors.

    Every rank creates one at the same time. A failure of one rank never blocks the others: each
    rank allocates its memory before the first message, and after a failure it continues to exchange
    messages (``GatheredWeights``).
    """

    def __init__(self, model: torch.nn.Module, config: ModelConfig) -> None:
        """Exchange the contents of all ranks. Collective.

        Args:
            model: model of any parallel layout.
            config: model configuration.
        """
        self.config = config
        self.device = next(model.parameters()).device
        self.local = LocalWeights(model, config)
        self._dtype = list_chunks(model)[0].config.params_dtype

        # Ranks agree through host memory, because a full GPU has no memory for it.
        self._agreement: Any = dist.group.WORLD
        if dist.get_backend() != "gloo":
            self._agreement = dist.new_group(backend="gloo")
            # NCCL allocates its buffers at the first message. Do it while memory is available.
            dist.all_reduce(torch.zeros(1, device=self.device))

        # Plans are computed from these contents alone, equally on every rank.
        own_contents = RankContents(
            dtypes=self.local.sent_dtypes(),
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            mxfp4_bases=self.local.mxfp4_bases(),
        )
        self._planner = GatheringPlanner(
            config,
            ranks=self._gather_on_hosts(own_contents),
            tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
            adapter=list_chunks(model)[0].config.adapter,
        )
        # Plans depend on these arguments only, so every weight sync reuses them.
        self._plans: dict[tuple[tuple[int, ...], bool, bool], WeightGatherPlan] = {}

    def begin(
        self,
        receivers: Sequence[int] = (0,),
        *,
        transposed: bool = False,
        mxfp4_experts: bool = False,
        adapters_only: bool = False,
        paced: bool = False,
    ) -> "GatheredWeights":
        """Begin to gather all weights on the global ranks ``receivers``. Collective.

        Args:
            receivers: global ranks that receive the weights.
            transposed: see ``names.hf_tensors``.
            mxfp4_experts: whether MXFP4-trained experts are yielded as blocks and scales, under the names
                of ``hf_layouts.mxfp4_shapes``, instead of as values. If adapters of experts are not
                merged, their base in MXFP4 is yielded, and their factors (``expert_adapters``)
                follow all weights.
            adapters_only: whether to yield only these factors and the weights with merged adapters.
            paced: whether ranks wait for each other before every message. Tensors to send are made
                before the wait. For slow receivers, such as one that writes to a disk.

        Raises:
            GatheringAbortedError: on every rank, if one has no memory for its part.
        """
        buffer = None
        reason = ""
        # Allocate before the first message: a failure between two messages would block other
        # ranks.
        try:
            plan = self.plan(
                tuple(receivers), mxfp4_experts=mxfp4_experts, adapters_only=adapters_only
            )
            buffer = torch.empty(plan.buffer_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:  # CUDA out of memory
            reason = (
                f"rank {dist.get_rank()} cannot allocate memory for weights of other ranks: {error}"
            )

        # Tell all ranks before the first message. A rank that continued alone would wait forever.
        for failure in self._gather_on_hosts(reason):
            if failure:
                raise GatheringAbortedError(failure)
        assert buffer is not None
        return GatheredWeights(
            self, plan, buffer, transposed=transposed, mxfp4_experts=mxfp4_experts, paced=paced
        )

    def confirm(self, weights: "GatheredWeights") -> Iterator[NamedTensor]:
        """Yield the tensors of ``weights``, and fail at the end if any rank could not read its own.

        A rank that cannot read its weights sends arbitrary values in their place. Collective: every
        rank must exhaust the iterator. Tensors [...] have Hugging Face's shapes and the model's
        dtypes.

        Args:
            weights: result of ``begin``.

        Raises:
            ConversionError: on every rank, naming the rank and the cause.
            GatheringError: if the ranks can exchange no more messages.
        """
        failure: Exception | None = None
        try:
            yield from weights
        # After a failed message, the ranks could not exchange the reasons below either.
        except GatheringError:
            raise
        except Exception as error:
            failure = error

        # A receiver that only calls ``finish`` does not see its own failure. Report it here.
        failure = failure or weights.failure
        reasons = self._gather_on_hosts("" if failure is None else str(failure) or repr(failure))
        for rank, reason in enumerate(reasons):
            if reason:
                raise ConversionError(f"rank {rank} could not read its weights: {reason}")

    def unpack(self, joined: torch.Tensor) -> torch.Tensor:
        """Dequantize a parameter that was received as MXFP4.

        Args:
            joined: uint8 [..., in / 32, 17], as from ``mxfp4_tensors.append_scales``.

        Returns:
            Values [..., in] in the model's dtype.
        """
        return mxfp4.dequantize(*separate_scales(joined)).to(self._dtype)

    def mxfp4_digests(self) -> Digests:
        """Return digests of all MXFP4-trained experts, equal on every rank. Collective.

        Raises:
            ConversionError: naming a matrix of which two ranks hold different copies.
        """
        digests: Digests = {}
        # Ranks with copies of one matrix must agree, or they would train different models.
        for rank_digests in self._gather_on_hosts(self.local.mxfp4_digests()):
            for name, digest in rank_digests.items():
                if digests.setdefault(name, digest) != digest:
                    raise ConversionError(
                        f"{name}: the copies of two ranks differ, although replicas must be equal. "
                        "Continue from the last checkpoint with --resume"
                    )
        return digests

    def plan(
        self, receivers: tuple[int, ...], *, mxfp4_experts: bool, adapters_only: bool = False
    ) -> WeightGatherPlan:
        """Return the plan for a set of receivers. Plans are cached.

        Args:
            receivers: global ranks.
            mxfp4_experts: see ``begin``.
            adapters_only: see ``begin``.
        """
        key = (receivers, mxfp4_experts, adapters_only)
        if key not in self._plans:
            self._plans[key] = self._planner.plan(
                receivers, mxfp4_experts=mxfp4_experts, adapters_only=adapters_only
            )
        return self._plans[key]

    def wait_for_all_ranks(self) -> None:
        """Wait until every rank has called this method. Collective; does not use the GPU.

        Raises:
            GatheringError: if a rank has exited, or exceeds the timeout of the process group.
        """
        try:
            dist.barrier(group=self._agreement)
        except Exception as error:
            raise GatheringError(
                f"rank {dist.get_rank()} waited for the other ranks: {error}"
            ) from error

    def _gather_on_hosts[T](self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. Collective; does not use the GPU."""
        if dist.get_world_size() == 1:
            return [value]
        gathered = [value] * dist.get_world_size()
        dist.all_gather_object(gathered, value, group=self._agreement)
        return gathered


class GatheredWeights(Iterator[NamedTensor]):
    """Yields all Hugging Face tensors of the model on the receiving ranks, in ``hf_shapes`` order.

    Other ranks yield no tensor. Collective: every rank must exhaust the iterator or call
    ``finish``. If a rank fails between two messages, for example because it is out of memory, it
    takes part in the remaining messages before it raises. A single receiver gets point-to-point
    messages, several receivers get broadcasts.

    In addition to its own weights, a receiver holds one Hugging Face tensor at a time (for experts,
    the stack of a layer). Tensors keep the parameter's dtype and device: the router's bias of a
    bf16 model is fp32. A yielded tensor may share memory with a parameter, so copy it to keep it
    beyond the next optimizer step.
    """

    def __init__(
        self,
        gathering: WeightGathering,
        plan: WeightGatherPlan,
        buffer: torch.Tensor,
        *,
        transposed: bool,
        mxfp4_experts: bool,
        paced: bool,
    ) -> None:
        self._gathering = gathering
        self._receivers = plan.receivers
        self._buffer = buffer
        self._mxfp4_experts = mxfp4_experts
        self._is_receiver = dist.get_rank() in plan.receivers

        self._paced = paced

        # Shared by the assembly of tensors and by ``finish``, which only exchanges messages.
        self._steps = iter(plan.steps)
        self._read_ahead: dict[str, torch.Tensor] = {}
        # The experts received so far of one layer, by stored name.
        self._stack: dict[str, torch.Tensor] = {}
        self.failure: Exception | None = None
        """Error that kept this rank from reading its own weights; None without an error.

        The other ranks received arbitrary values, so the caller must check it after all messages.
        """
        # MXFP4 experts are stored output-major already.
        self._assembled = stack_experts(
            gathering.config, self._received_parts(), transposed=transposed and not mxfp4_experts
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
        except (StopIteration, GatheringError):
            raise
        # The other ranks still expect this rank's messages.
        except Exception:
            self.finish()
            raise

    @torch.no_grad()
    def finish(self) -> None:
        """Take part in the remaining messages and drop their contents."""
        for step in self._steps:
            self._exchange(step)

    def _received_parts(self) -> Iterator[NamedParts]:
        """Yield the Hugging Face tensors of each parameter as they arrive."""
        for step in self._steps:
            mapping = step.mapping
            arrived = self._exchange(step)
            # Arbitrary values were sent in place of this rank's weights, so stop assembling
            # tensors.
            if self.failure is not None:
                raise self.failure

            # Stacks arrive in Hugging Face's row order, so they need no conversion.
            if step.stack:
                came = [tensor for tensor in arrived if tensor is not None]
                if complete := self._add_to_stack(step, came):
                    yield replace(mapping, expert=None), complete
                continue

            # In the order of the tensor-parallel ranks, each [out / tensor, in] or
            # [out, in / tensor]. Shards that every receiver holds were not sent.
            shards = []
            for shard in arrived:
                shards.append(self._read(mapping.name) if shard is None else shard)
            full = mapping.unshard(shards)
            if step.is_quantized:
                yield mapping, self._expert_parts(mapping, full)
                continue

            # The next parameter overwrites the buffer. Experts are copied to their stack anyway.
            if mapping.expert is None and _shares_memory(full, self._buffer):
                full = full.clone()
            yield mapping, mapping.named_parts(full)

    def _add_to_stack(
        self, step: WeightGatherStep, arrived: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Add the experts of a step to the stack of their layer.

        Args:
            step: step with a ``stack``.
            arrived: received tensors, in the order of ``stack_names``; empty to read own weights.

        Returns:
            The complete stack by stored name after the last expert, else an empty dict.
        """
        experts = self._gathering.config.num_experts
        if arrived:
            tensors = dict(zip(step.stack_names, arrived, strict=True))
        else:
            tensors = self._gathering.local.read_stack(step.stack, quantized=step.is_quantized)
            if len(step.stack) == experts:
                return tensors  # saves a copy

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
        # Release the stack here: the caller holds the only other reference.
        self._stack = {}
        return complete

    def _read(self, name: str) -> torch.Tensor:
        """Return this rank's shard of a parameter in the form in which it is sent."""
        if name not in self._read_ahead:
            self._read_ahead.clear()  # frees memory before the next read
            self._read_ahead = self._gathering.local.read(name)
        # Removed, so that a tensor is freed after its message.
        return self._read_ahead.pop(name)

    def _expert_parts(
        self, mapping: ParameterMapping, joined: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Convert an expert's matrix from MXFP4 messages to the parts that the caller requested."""
        if self._mxfp4_experts:
            return mxfp4_parts(mapping, *separate_scales(joined))
        return mapping.named_parts(self._gathering.unpack(joined))

    def _exchange(self, step: WeightGatherStep) -> list[torch.Tensor | None]:
        """Send or receive the messages of a step.

        Raises only GatheringError: a rank that stopped here would block the others.

        Returns:
            Tensor of each message; None for shards that every receiver has.
        """
        local_tensors = self._own_tensors(step)

        # NCCL posts a message without waiting for the receiver. A kernel on the sender's GPU then
        # waits for it. The kernel's timeout runs during that time, and other processes on the same
        # GPU, such as a server's rank that loads earlier weights, get only every second time slice.
        if self._paced and any(message is not None for message in step.messages):
            self._gathering.wait_for_all_ranks()

        arrived: list[torch.Tensor | None] = []
        for number, message in enumerate(step.messages):
            if message is None:
                arrived.append(None)
                continue
            tensor = local_tensors.get(number)
            if tensor is None:
                tensor = message.view_in(self._buffer)
            self._send_or_receive(step.mapping.name, message, tensor)
            arrived.append(tensor)
        return arrived

    def _own_tensors(self, step: WeightGatherStep) -> dict[int, torch.Tensor]:
        """Return the tensors that this rank sends in a step, by index of the message."""
        rank = dist.get_rank()
        numbers = [
            i for i, message in enumerate(step.messages) if message and message.source == rank
        ]
        if not numbers:
            return {}
        try:
            if not step.stack:
                # Only one message, because each tensor-parallel shard comes from another rank.
                return dict.fromkeys(numbers, self._read(step.mapping.name))
            stack = self._gathering.local.read_stack(step.stack, quantized=step.is_quantized)
            return dict(zip(numbers, stack.values(), strict=True))
        except Exception as error:
            # The other ranks wait for a message of this size. Send arbitrary values. ``failure``
            # keeps receivers from using them.
            self.failure = self.failure or error
            return {}

    def _send_or_receive(self, name: str, message: ShardMessage, tensor: torch.Tensor) -> None:
        """Send or receive one message.

        Args:
            name: parameter, for errors.
            message: message to exchange.
            tensor: values to send, or the receive buffer.
        """
        rank = dist.get_rank()
        try:
            # A broadcast reaches all ranks of the group, so every rank takes part.
            if len(self._receivers) > 1:
                dist.broadcast(tensor, src=message.source)
            elif rank == message.source:
                dist.send(tensor, dst=self._receivers[0])
            elif self._is_receiver:
                dist.recv(tensor, src=message.source)
        except Exception as error:
            raise GatheringError(f"rank {rank}, parameter {name}: {error}") from error


def _shares_memory(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Return True if both tensors use the same memory."""
    # Views at any offset share the storage.
    return tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
