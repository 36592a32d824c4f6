"""Trainer rank: forward pass, backward pass and optimizer step on packed micro-batches."""

import functools
import logging
import math
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from megatron_gptoss.config import OptimizerConfig
from megatron_gptoss.expert_loads import ExpertLoads
from megatron_gptoss.gpu_memory import PhaseMemory, release_cached_memory
from megatron_gptoss.layers.moe_layer import GptOssMoELayer
from megatron_gptoss.log_probs import log_probs_with_candidates
from megatron_gptoss.optimizer import build_optimizer, wrap_data_parallel
from megatron_gptoss.optimizer_offload import OffloadedState
from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.planning.flops import training_flops
from megatron_gptoss.scorer import (
    Head,
    LogProbScorer,
    gather_context_parallel,
    label_log_probs,
)
from megatron_gptoss.step_clock import StepClock
from megatron_gptoss.step_results import LossFunction, LossOutput, StepStatistics

logger = logging.getLogger(__name__)


class PolicyTrainer(LogProbScorer):
    """Trainer of a ``build_model`` model, with Megatron's data parallelism and optimizer."""

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig) -> None:
        """Wrap the model and create its optimizer. Collective.

        Args:
            model: model of this rank.
            config: settings of the optimizer.

        Raises:
            ValueError: a pipeline stage has no parameter to train.
        """
        super().__init__(model)
        _check_trained(self.module)
        self.config = config
        self.clock = StepClock()
        self.memory = PhaseMemory(None)
        """Memory meter, which receives the phases of a step. The default does not measure."""

        # Megatron's schedules read their hooks from the configuration that all layers share.
        model_config = self.chunks[0].config
        model_config.finalize_model_grads_func = _finalize_gradients
        model_config.timers = self.clock
        self._prepare_modules()

        self.model = wrap_data_parallel(self.chunks, model_config, config)
        self.optimizer = build_optimizer(self.model, model_config.params_dtype, config)
        self._expert_loads = ExpertLoads(model, model_config.num_layers)
        self.offloaded = OffloadedState(self.optimizer, config.offload_fraction)
        self.updated = False
        """True after the first optimizer step. Before it, the optimizer has no state to save."""

    def _prepare_modules(self) -> None:
        """Set options of modules that cannot be set through the configuration."""
        for module in self.module.modules():
            has_trained = any(p.requires_grad for p in module.parameters(recurse=False))
            if has_trained and hasattr(module, "fuse_wgrad_accumulation"):
                # With this option Transformer Engine accumulates weight gradients in Megatron's
                # buffer. The configuration would also set it for the output layer, which we never
                # call, and then require Apex.
                module.fuse_wgrad_accumulation = True  # type: ignore[assignment]
            if isinstance(module, GptOssMoELayer):
                module.clock = self.clock

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_function: LossFunction,
        learning_rate: float,
        temperature: float = 1,
        load_balancing: float = 0,
    ) -> StepStatistics:
        """Take one optimizer step. Collective.

        If the gradient is not finite, the step is skipped and the statistics report it.

        Args:
            batches: micro-batches of this data-parallel rank. All ranks pass the same number.
            loss_function: see LossFunction.
            learning_rate: learning rate of this step.
            temperature: divisor of the logits.
            load_balancing: coefficient of the load-balancing loss of every layer's router. 0 for no
                such loss.

        Returns:
            Statistics of the step, the same on all ranks except ``token_values``.

        Raises:
            FloatingPointError: the gradient is not finite and ``on_non_finite`` is "stop".
            ValueError: there are no loads to balance, see ``ExpertLoads.balance``.
        """
        started = time.perf_counter()
        self._expert_loads.balance(batches, load_balancing)
        self.clock.begin()
        self.memory.enter("update")
        outputs = self._compute_gradients(batches, loss_function, temperature)

        # Before the optimizer step, so that a skipped step has these figures, too.
        sums, maxima = self._reduce_outputs(outputs)
        if self.replay is not None:
            sums |= self.replay.agreement()

        statistics = StepStatistics(
            sums=sums,
            maxima=maxima,
            grad_norm=math.nan,
            learning_rate=learning_rate,
            parameters_updated=False,
            expert_loads=self._expert_loads.take(),
            load_balancing_loss=self._expert_loads.balancing_loss(),
            token_values=_gather_token_values(outputs, batches),
        )
        self.clock.enter("optimizer")
        if self.config.offload_fraction:
            # Activations leave blocks in torch's cache. Few parts of the state fit into them, and
            # NCCL cannot use them at all.
            release_cached_memory()
        self.memory.enter("optimizer")
        # The check is collective, so all ranks make the same decision.
        if self._gradients_are_finite():
            self._update_parameters(statistics)
        else:
            self._report_non_finite_gradients(statistics)
        self.clock.leave()

        self._measure_speed(statistics, batches, started)
        self.memory.enter("between_phases")
        return statistics

    def _compute_gradients(
        self,
        batches: Sequence[PackedBatch],
        loss_function: LossFunction,
        temperature: float,
    ) -> list[LossOutput]:
        """Run forward and backward passes of all micro-batches.

        Returns:
            The output of the loss for each micro-batch, on the last pipeline stage only.
        """
        self.module.train()
        # Zero Megatron's buffers, too: the optimizer zeroes only the part that it updates.
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        # Megatron takes the second result for a number of tokens to divide by, which
        # _finalize_gradients prevents.
        def loss(values: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, LossOutput]:
            output = loss_function(*_loss_arguments(values, batch))
            return output.loss, torch.ones((), dtype=torch.int), output

        return self._run_schedule(
            batches,
            self._training_head(temperature),
            loss,
            forward_only=False,
        )

    def _training_head(self, temperature: float) -> Head:
        """Return the function that computes the tensors for ``loss_function``.

        For a policy these are log-probs and entropy, stacked as [2, labels]. For batches with
        ``teacher_top_ids`` [labels, k] they are followed by the log-probs of these ids: [2 + k, labels].
        """

        def head(hidden: Tensor, weight: Tensor, group: Any, batch: PackedBatch) -> Tensor:
            if batch.teacher_top_ids is None:
                return torch.stack(label_log_probs(hidden, weight, batch, temperature, group))
            # Not once for each pair of token and label, because the teacher's ids may differ.
            log_probs, entropy, of_teacher_ids = log_probs_with_candidates(
                batch.at_labels(hidden),
                weight,
                batch.labels,
                batch.teacher_top_ids.long(),
                temperature,
                group,
            )
            return torch.cat([torch.stack([log_probs, entropy]), of_teacher_ids.t()])

        return head

    def _reduce_outputs(
        self,
        outputs: Sequence[LossOutput],
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Reduce sums and maxima over micro-batches and ranks. Collective.

        Returns:
            Sums and maxima by name, the same on every rank.
        """
        sums = reduce_scalars([output.sums for output in outputs], dist.ReduceOp.SUM)
        maxima = reduce_scalars([output.maxima for output in outputs], dist.ReduceOp.MAX)
        sums, maxima = self._from_last_stage([sums, maxima])
        return sums, maxima

    def _update_parameters(self, statistics: StepStatistics) -> None:
        """Take the optimizer step and add its results to the statistics."""
        # This loop replaces Megatron's OptimizerParamScheduler, which applies ``wd_mult``. It is 0
        # for biases, norms and sinks, because decay would pull the model towards one without them.
        for group in self.optimizer.param_groups:
            group["lr"] = statistics.learning_rate
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]

        updated, grad_norm, _ = self.optimizer.step()
        statistics.parameters_updated = bool(updated)
        statistics.grad_norm = float(grad_norm)
        self.updated |= statistics.parameters_updated

    def _report_non_finite_gradients(self, statistics: StepStatistics) -> None:
        """Add the parameters to the statistics, and log a warning or raise an error. Collective."""
        statistics.non_finite_gradients = self._describe_non_finite_gradients()
        if self.config.on_non_finite == "stop":
            raise FloatingPointError(statistics.non_finite_gradients)
        logger.warning("optimizer step skipped: %s", statistics.non_finite_gradients)

    def _gradients_are_finite(self) -> bool:
        """Return True if all gradients of all ranks are finite. Collective."""
        # The maximum norm needs no temporary tensor, and propagates NaN and infinity.
        largest = []
        for chunk in self.model:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                magnitude = torch.linalg.vector_norm(buffer.grad_data, ord=torch.inf)
                largest.append(magnitude.float())

        is_finite = torch.stack(largest).isfinite().all().int()
        dist.all_reduce(is_finite, op=dist.ReduceOp.MIN)
        return bool(is_finite)

    def _describe_non_finite_gradients(self) -> str:
        """Return a message with the affected parameters of all ranks, by layer. Collective."""
        local_names = []
        for i, chunk in enumerate(self.chunks):
            names = [
                f"{name} (rank {dist.get_rank()}, chunk {i})"
                for name, parameter in chunk.named_parameters()
                if parameter.requires_grad and not parameter.main_grad.isfinite().all()
            ]
            local_names.append(names)

        # In layer order: chunk 0 of every rank comes before chunk 1 of any rank.
        gathered: list[list[list[str]]] = [local_names] * dist.get_world_size()
        dist.all_gather_object(gathered, local_names)
        names = []
        for chunk_of_ranks in zip(*gathered, strict=True):
            for rank_names in chunk_of_ranks:
                names += rank_names

        if len(names) == 1:
            return f"the gradient of {names[0]} is not finite. Other gradients are finite"
        return (
            f"the gradients of {len(names)} parameters are not finite. The first is {names[0]}, the last "
            f"is {names[-1]}. Begin with the last one, because NaN spreads from there to earlier layers"
        )

    def _computed_flops(self, batches: Sequence[PackedBatch]) -> int:
        """Return the floating-point operations of micro-batches. Shared prefixes count once."""
        segments = [batch.segments for batch in batches]
        starts = [depth for row in segments for depth in row.depths]
        ends = [
            depth + length
            for row in segments
            for depth, length in zip(row.depths, row.lengths, strict=True)
        ]
        config = self.chunks[0].config
        return training_flops(
            config.architecture, ends, starts, frozen_base=config.adapter is not None
        )

    def _measure_speed(
        self,
        statistics: StepStatistics,
        batches: Sequence[PackedBatch],
        started: float,
    ) -> None:
        """Add time and speed over all ranks to the statistics. Collective."""
        device = next(self.module.parameters()).device
        world_size = dist.get_world_size()

        # Tensor-, pipeline- and context-parallel ranks have the same micro-batches, so sum over
        # data-parallel ranks only.
        local_tokens = sum(len(batch.labels) for batch in batches)
        local_flops = self._computed_flops(batches)
        work = torch.tensor([local_tokens, local_flops], dtype=torch.double, device=device)
        dist.all_reduce(work, group=parallel_state.get_data_parallel_group())

        # Reading a result waits for all queued GPU work, so the step is complete after this line.
        tokens, flops = work.tolist()
        local_parts = self.clock.end()
        local_seconds = time.perf_counter() - started

        seconds = torch.tensor(local_seconds, dtype=torch.double, device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        parts = torch.tensor(list(local_parts.values()), dtype=torch.double, device=device)
        parts /= world_size
        dist.all_reduce(parts)

        statistics.seconds = float(seconds)
        statistics.seconds_by_part = dict(zip(local_parts, parts.tolist(), strict=True))
        gpu_seconds = world_size * statistics.seconds
        statistics.tokens_per_second_per_gpu = tokens / gpu_seconds
        statistics.tflops_per_gpu = flops / gpu_seconds / 1e12
        if device.type == "cuda":
            statistics.mfu = statistics.tflops_per_gpu / matmul_ceiling()


def _loss_arguments(values: Tensor, batch: PackedBatch) -> list[Tensor | PackedBatch]:
    """Split the output of a training head into the arguments of a loss function."""
    if batch.teacher_top_ids is None:
        return [*values, batch]
    return [values[0], values[1], batch, values[2:].t()]


def _check_trained(module: torch.nn.Module) -> None:
    """Raise ValueError on all ranks if a rank has no parameter to train. Collective."""
    has_trained = any(parameter.requires_grad for parameter in module.parameters())
    stage = parallel_state.get_pipeline_model_parallel_rank()
    gathered: list[tuple[bool, int]] = [(has_trained, stage)] * dist.get_world_size()
    dist.all_gather_object(gathered, (has_trained, stage))
    idle = sorted({stage for has_trained, stage in gathered if not has_trained})
    if idle:
        raise ValueError(
            f"model: no parameter of pipeline stages {', '.join(map(str, idle))} requires a "
            "gradient. Use fewer pipeline stages, or train a part of every layer"
        )


def _finalize_gradients(
    model: list[Any],
    num_tokens: Tensor | None = None,
    **kwargs: Any,
) -> None:
    """Sum gradients over ranks without dividing by Megatron's number of tokens."""
    # Loss functions normalize over the global batch.
    finalize_model_grads(model, None, **kwargs)


def _gather_token_values(
    outputs: Sequence[LossOutput], batches: Sequence[PackedBatch]
) -> dict[str, list[Tensor]]:
    """Join the token values of losses over context-parallel ranks. Collective among these.

    Returns:
        [tokens] of every micro-batch by name. Empty on stages before the last.
    """
    if not outputs:
        return {}
    values = {}
    for name in outputs[0].token_values:
        shards = [output.token_values[name] for output in outputs]
        values[name] = gather_context_parallel(shards, batches)
    return values


def reduce_scalars(
    values: Sequence[dict[str, Tensor]],
    operation: dist.ReduceOp.RedOpType,
) -> dict[str, float]:
    """Reduce named scalars over micro-batches, data- and context-parallel ranks. Collective.

    Args:
        values: scalars [] of any dtype of every micro-batch, with the same names in all. Empty on
            pipeline stages before the last.
        operation: SUM or MAX.

    Returns:
        Reduced values by name.

    Raises:
        ValueError: a name is missing in some micro-batches.
    """
    if not values:
        return {}
    names = sorted(values[0])
    for scalars in values:
        differing = sorted(set(names) ^ set(scalars))
        if differing:
            raise ValueError(
                f"loss metrics {', '.join(differing)} are missing in some micro-batches. Return all "
                "names for every micro-batch, with 0 if there is nothing to sum"
            )
    if not names:
        return {}

    # One message for all names. In fp64, because sums cover up to millions of tokens. Sorted,
    # because ranks reduce by position.
    rows = [torch.stack([scalars[name].detach().double() for name in names]) for scalars in values]
    stacked = torch.stack(rows)
    combine = torch.sum if operation == dist.ReduceOp.SUM else torch.amax
    reduced = combine(stacked, dim=0)

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(reduced, op=operation, group=group)
    return dict(zip(names, reduced.tolist(), strict=True))


@functools.cache
def matmul_ceiling(size: int = 8192, rounds: int = 10) -> float:
    """Return the TFLOP/s of a bf16 product between two square matrices, measured once (0.05 s).

    Args:
        size: rows and columns of the matrices.
        rounds: number of measurements, of which the median is returned.
    """
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)

    milliseconds = []
    for _ in range(rounds + 2):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        a @ b
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))

    # The first two rounds are for warm-up. FLOP per millisecond times 1e-9 is TFLOP/s.
    return 2 * size**3 / median(milliseconds[2:]) / 1e9
