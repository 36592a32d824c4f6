"""One trainer rank: forward, backward, optimizer step and scoring on packed micro-batches."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import (
    ParamGroupOverride,
    clip_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_gptoss.config import OptimizerConfig
from megatron_gptoss.log_probs import log_probs_and_entropy, most_likely_tokens, whole_hidden_states
from megatron_gptoss.model import chunks_of
from megatron_gptoss.optimizer_offload import OffloadedState
from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.planning.flops import forward_flops, matmul_ceiling
from megatron_gptoss.routing_replay import RoutingReplay
from megatron_gptoss.static_shape_p2p import StaticShapeP2P
from megatron_gptoss.step_clock import StepClock, TimedMoELayer

logger = logging.getLogger(__name__)


@dataclass
class LossOutput:
    """What a loss says about one micro-batch.

    ``loss`` is a *sum* over the tokens of the micro-batch, already divided by whatever the loss is normalised with over
    the global batch, so that adding up micro-batches and ranks gives the loss. ``sums`` are added up over micro-batches
    and ranks, ``maxima`` are maximised; both hold scalars."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)


LossFunction = Callable[..., LossOutput]
"""(log_probs [tokens], entropy [tokens], batch) -> LossOutput; of a critic (values [tokens], batch) -> LossOutput"""

Head = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, PackedBatch], torch.Tensor]
"""(hidden [tokens, hidden_size], output weight of this rank, tensor-parallel group, batch) -> the model's output"""


@dataclass
class StepStatistics:
    """One optimizer step, the same on every rank."""

    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    parameters_updated: bool
    not_finite: str | None = None
    """Which parameters have a gradient that is not finite, when there is one; the step was skipped."""
    seconds: float = 0.0
    """Wall-clock time of the step, of the slowest rank."""
    seconds_of: dict[str, float] = field(default_factory=dict)
    """The mean rank's forward, backward, optimizer, communication (experts' all-to-all, pipeline stages, gradients, as
    far as nothing hides it; that of tensor and context parallelism counts as forward and backward) and other."""
    tokens_per_second_per_gpu: float = 0.0
    tflops_per_gpu: float = 0.0
    """Of the model's arithmetic, ``performance.forward_flops`` three times over; nothing is counted twice."""
    mfu: float | None = None
    """The same as a share of a large bf16 matrix product on this machine; None on CPUs."""


_applier = clip_grads.multi_tensor_applier


def one_dtype_at_a_time(operation: Any, overflow: torch.Tensor, lists: list[list[torch.Tensor]], *options: Any) -> Any:
    """Megatron's ``multi_tensor_applier`` for norms and scaling of gradients of several dtypes, as of bf16 weights and
    the routers' fp32 biases: Transformer Engine takes all tensors of a list for the dtype of the first."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in lists[0])
    of_one = [[[tensor for tensor in part if tensor.dtype == dtype] for part in lists] for dtype in dtypes]
    results = [_applier(operation, overflow, part, *options) for part in of_one]
    norms = [result[0] for result in results if result is not None]  # None: scaled in place, or no elements
    return (torch.stack(norms).norm(dim=0), None) if norms else None


class Scorer:
    """Megatron's forward schedule around what ``build_model`` returned."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = model
        self.chunks = chunks_of(model)
        self.model: list[Any] = list(self.chunks)
        """The chunks as the schedule takes them."""
        self.replay: RoutingReplay | None = None
        """Set, the routers take the experts that a batch brings along."""

    def score(self, batches: Sequence[PackedBatch], temperature: float = 1.0) -> list[torch.Tensor]:
        """log p(labels) of every micro-batch, [tokens] each, on every rank of the data-parallel slice. Collective."""

        def head(hidden: torch.Tensor, weight: torch.Tensor, group: Any, batch: PackedBatch) -> torch.Tensor:
            return log_probs_and_entropy(hidden, weight, batch.labels, temperature, group)[0]

        return self._evaluate(batches, head)

    def most_likely(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """The token that greedy decoding would choose at every position: int64 [tokens] per micro-batch. Collective."""
        return self._evaluate(batches, lambda hidden, weight, group, _: most_likely_tokens(hidden, weight, group))

    @torch.no_grad()
    def _evaluate(self, batches: Sequence[PackedBatch], head: Head) -> list[torch.Tensor]:
        self.module.eval()

        def collect(values: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return values.new_zeros(()), torch.ones((), dtype=torch.int), values

        values = self._run(batches, head, collect, forward_only=True)
        cp_group = parallel_state.get_context_parallel_group()
        if parallel_state.is_pipeline_last_stage() and cp_group.size() > 1:
            for i, shard in enumerate(values):
                parts = [torch.empty_like(shard) for _ in range(cp_group.size())]
                dist.all_gather(parts, shard.contiguous(), group=cp_group)
                values[i] = torch.cat(parts)[batches[i].context_layout_over(len(parts)).inverse.to(shard.device)]
        return self._from_last_stage(values)

    def _run(
        self, batches: Sequence[PackedBatch], head: Head, loss: Callable[..., Any], forward_only: bool
    ) -> list[Any]:
        device = next(self.module.parameters()).device

        def forward_step(batches: Iterator[PackedBatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            context = parallel_state.get_context_parallel_group()
            batch = next(batches).context_parallel_shard(context.rank(), context.size()).to(device)

            def head_of_batch(hidden_states: torch.Tensor, output_layer: Any, **_: Any) -> torch.Tensor:
                gather_parameters([model], [output_layer.weight])
                hidden = whole_hidden_states(hidden_states, output_layer)
                return head(hidden, output_layer.weight, output_layer.tp_group, batch)

            if self.replay is not None and model is self.model[0]:  # the others come to the micro-batch later
                self.replay.give(batch.routed_experts)
            output = model(
                batch.input_ids[None],
                batch.position_ids[None],
                None,
                packed_seq_params=batch.packed_seq_params(),
                output_processor=head_of_batch,
            )
            return output, lambda output: loss(output, batch)

        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.model],
            model=self.model,
            num_microbatches=len(batches),
            seq_length=max(batch.tokens for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=StaticShapeP2P(self.chunks, [batch.tokens // alignment() for batch in batches]),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        if self.replay is not None:
            self.replay.check_consumed()
        return outputs

    @staticmethod
    def _from_last_stage(values: list[Any]) -> list[Any]:
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return values
        box = [values]
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(box, src=last, group=group)
        return box[0]


@torch.no_grad()
def gather_parameters(chunks: Iterable[Any], parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
    """Wait until this rank has what the last optimizer step made of ``parameters``, by default all of ``chunks``.

    Under the distributed optimizer a rank updates its share, and Megatron gathers a module's weights when its forward
    is called: whoever reads them in another way calls this first, or silently gets old ones. Collective over
    data-parallel ranks; does nothing for a model that is not in Megatron's data-parallel wrapper."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            for parameter in chunk.params_with_grad if parameters is None else parameters:
                if parameter in chunk.param_to_bucket_group:
                    chunk.param_to_bucket_group[parameter].finish_param_sync(skip_next_bucket_dispatch=True)


class PolicyTrainer(Scorer):
    """Megatron's data-parallel wrapper and optimizer around what ``build_model`` returned."""

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig) -> None:
        super().__init__(model)
        self.config, model_config = config, self.chunks[0].config
        dtype = model_config.params_dtype
        on_gpu = torch.cuda.is_available()
        sums_in_fp32 = dtype != torch.float64 and not (on_gpu and config.gradient_dtype == "bf16")
        model_config.finalize_model_grads_func = self._finalize_gradients
        model_config.timers = self.clock = StepClock()
        reduction = DistributedDataParallelConfig(
            use_distributed_optimizer=on_gpu,
            overlap_grad_reduce=on_gpu,
            overlap_param_gather=on_gpu,
            grad_reduce_in_fp32=sums_in_fp32,
            check_for_nan_in_grad=False,
            average_in_collective=False,
        )
        self.model = [DistributedDataParallel(model_config, reduction, chunk) for chunk in self.chunks]
        no_sync = [part.no_sync for part in self.model]  # gradients are reduced after the last micro-batch only
        model_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        for module in model.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                # Transformer Engine adds weight gradients to Megatron's buffer inside the product. Not set through the
                # configuration, which would ask for Apex on behalf of an output layer that we never call.
                module.fuse_wgrad_accumulation = True  # type: ignore[assignment]
            if isinstance(module, TimedMoELayer):
                module.clock = self.clock
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=on_gpu,
            **(self._gpu_optimizer(config) if on_gpu and dtype == torch.bfloat16 else {}),
        )
        # a group of their own for the fp32 biases of the routers: Megatron confuses the order of a group of two dtypes
        # when it saves the optimizer (start_wd only tells the groups apart)
        router_biases = {ParamKey(name="*.router.bias"): ParamGroupOverride(start_wd=config.weight_decay)}
        self.optimizer = get_megatron_optimizer(
            settings, self.model, config_overrides=get_standard_config_overrides(settings) | router_biases
        )
        if not sums_in_fp32:
            clip_grads.multi_tensor_applier = one_dtype_at_a_time
        self.offloaded = OffloadedState(self.optimizer, config.offload)
        self.updated = False
        """Whether the optimizer has taken a step; it has nothing to save before."""

    @staticmethod
    def _gpu_optimizer(config: OptimizerConfig) -> dict[str, Any]:
        # fp32 master weights are kept as the 16 bits that the bf16 weights lack
        moments = torch.bfloat16 if config.moment_dtype == "bf16" else torch.float32
        return {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": torch.bfloat16 if config.gradient_dtype == "bf16" else torch.float32,
            "exp_avg_dtype": moments,
            "exp_avg_sq_dtype": moments,
        }

    @staticmethod
    def _finalize_gradients(model: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
        # losses come in normalised over the global batch: gradients are only to be added up, never divided
        finalize_model_grads(model, None, **kwargs)

    def train_step(
        self, batches: Sequence[PackedBatch], loss_function: LossFunction, learning_rate: float, temperature: float = 1
    ) -> StepStatistics:
        """One optimizer step over this data-parallel rank's micro-batches. Collective; ranks pass equally many.

        A step whose gradient is not finite changes nothing and says so, or raises FloatingPointError where
        ``on_non_finite`` is "stop"."""
        started = time.perf_counter()
        self.clock.begin()
        self.module.train()
        for part in self.model:
            part.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss(values: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, LossOutput]:
            output = loss_function(*values, batch)
            return output.loss, torch.ones((), dtype=torch.int), output

        outputs = self._run(batches, self._training_head(temperature), loss, forward_only=False)
        sums, maxima = self._reduce(outputs)
        if self.replay is not None:
            sums |= self.replay.agreement()
        statistics = StepStatistics(sums, maxima, math.nan, learning_rate, parameters_updated=False)
        self.clock.enter("optimizer")
        if self._gradients_are_finite():
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            with self.offloaded.on_device():
                updated, grad_norm, _ = self.optimizer.step()
            statistics.parameters_updated, statistics.grad_norm = bool(updated), float(grad_norm)
            self.updated |= statistics.parameters_updated
        else:
            statistics.not_finite = self._where_gradients_are_not_finite()
            if self.config.on_non_finite == "stop":
                raise FloatingPointError(statistics.not_finite)
            logger.warning("optimizer step skipped: %s", statistics.not_finite)
        self.clock.leave()
        self._measure(statistics, batches, started)
        return statistics

    def _training_head(self, temperature: float) -> Head:
        """What ``loss_function`` gets: log-probs and entropy, [2, tokens]."""

        def head(hidden: torch.Tensor, weight: torch.Tensor, group: Any, batch: PackedBatch) -> torch.Tensor:
            return torch.stack(log_probs_and_entropy(hidden, weight, batch.labels, temperature, group))

        return head

    def _gradients_are_finite(self) -> bool:
        # the largest magnitude needs no temporary, and NaN is the maximum of anything
        buffers = [buffer for part in self.model for buffer in part.buffers + part.expert_parallel_buffers]
        largest = [torch.linalg.vector_norm(buffer.grad_data, ord=torch.inf).float() for buffer in buffers]
        finite = torch.stack(largest).isfinite().all().int()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite)

    def _where_gradients_are_not_finite(self) -> str:
        own = [
            [
                f"{name} (rank {dist.get_rank()}, chunk {i})"
                for name, parameter in chunk.named_parameters()
                if not parameter.main_grad.isfinite().all()
            ]
            for i, chunk in enumerate(self.chunks)
        ]
        everyone = [own] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        names = [name for chunk in zip(*everyone, strict=True) for of_rank in chunk for name in of_rank]
        return (
            f"the gradients of {len(names)} parameters are not finite, from {names[0]} to {names[-1]}; "
            "the backward pass carries NaN towards the input, so look at the last one first"
        )

    def _measure(self, statistics: StepStatistics, batches: Sequence[PackedBatch], started: float) -> None:
        """Speed of the step from what all data-parallel ranks did in it."""
        device = next(self.module.parameters()).device
        lengths = [length for batch in batches for length in batch.cu_seqlens.diff().tolist()]
        done = sum(lengths), 3 * forward_flops(self.chunks[0].config.gptoss, lengths)
        work = torch.tensor(done, dtype=torch.double, device=device)
        dist.all_reduce(work, group=parallel_state.get_data_parallel_group())
        tokens, flops = work.tolist()  # which waits for everything before it on the GPU
        parts = self.clock.end()
        seconds = torch.tensor(time.perf_counter() - started, dtype=torch.double, device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        statistics.seconds = float(seconds)
        means = torch.tensor(list(parts.values()), dtype=torch.double, device=device) / dist.get_world_size()
        dist.all_reduce(means)
        statistics.seconds_of = dict(zip(parts, means.tolist(), strict=True))
        gpu_seconds = dist.get_world_size() * statistics.seconds
        statistics.tokens_per_second_per_gpu = tokens / gpu_seconds
        statistics.tflops_per_gpu = flops / gpu_seconds / 1e12
        if device.type == "cuda":
            statistics.mfu = statistics.tflops_per_gpu / matmul_ceiling()

    def _reduce(self, outputs: list[LossOutput]) -> tuple[dict[str, float], dict[str, float]]:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        reduced: list[dict[str, float]] = []
        for name, combine, op in (("sums", torch.sum, dist.ReduceOp.SUM), ("maxima", torch.amax, dist.ReduceOp.MAX)):
            values: dict[str, float] = {}
            if outputs and (keys := list(getattr(outputs[0], name))):
                per_batch = [torch.stack([getattr(o, name)[k].detach().double() for k in keys]) for o in outputs]
                total = combine(torch.stack(per_batch), dim=0)
                dist.all_reduce(total, op=op, group=group)
                values = dict(zip(keys, total.tolist(), strict=True))
            reduced.append(values)
        sums, maxima = self._from_last_stage(reduced)
        return sums, maxima


def data_parallel_slice(per_rank: Sequence[Sequence[PackedBatch]]) -> Sequence[PackedBatch]:
    """This rank's micro-batches out of what ``packing.pack`` returned."""
    return per_rank[parallel_state.get_data_parallel_rank()]


def alignment() -> int:
    """Tokens of a packed row must be a multiple of this in the current layout."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    return tensor * parallel_state.get_context_parallel_world_size()
