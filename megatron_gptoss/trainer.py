"""Trainer rank: forward pass, backward pass and optimizer step on packed micro-batches."""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_gptoss.config import OptimizerConfig
from megatron_gptoss.expert_loads import ExpertLoads
from megatron_gptoss.gpu_memory import PhaseMemory, release_cached_memory
from megatron_gptoss.gradient_reduction import (
    UnfinishedStep,
    copy_gradients,
    describe_non_finite_gradients,
    finalize_gradients,
    load_gradients,
    reduce_gradients,
    without_reduction,
)
from megatron_gptoss.layers.moe_layer import GptOssMoELayer
from megatron_gptoss.log_probs import log_probs_with_candidates
from megatron_gptoss.matmul_ceiling import matmul_ceiling
from megatron_gptoss.optimizer import (
    AdamSettings,
    apply_settings,
    build_optimizer,
    wrap_data_parallel,
)
from megatron_gptoss.optimizer_offload import OffloadedState
from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.planning.flops import training_flops
from megatron_gptoss.scorer import Head, LogProbScorer, label_log_probs
from megatron_gptoss.step_clock import StepClock
from megatron_gptoss.step_reductions import gather_token_values, reduce_scalars
from megatron_gptoss.step_results import (
    LossFunction,
    LossOutput,
    PassStatistics,
    StepStatistics,
    UpdateStatistics,
)

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
        model_config.finalize_model_grads_func = finalize_gradients
        model_config.timers = self.clock
        self._prepare_modules()

        self.model = wrap_data_parallel(self.chunks, model_config, config)
        self.optimizer = build_optimizer(self.model, model_config.params_dtype, config)
        self._expert_loads = ExpertLoads(model, model_config.num_layers)
        self.offloaded = OffloadedState(self.optimizer, config.offload_fraction)
        self.updated = False
        """True after the first optimizer step. Before it, the optimizer has no state to save."""
        self._passes = 0
        """Passes since the last step. The first one resets the gradients."""
        self._is_reduced = False
        """True if the gradients are reduced over ranks, so that only a step may follow."""
        self._failure: str | None = None
        """Message of the first failed pass since the last step. None if all passes succeeded."""

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
        """Take one optimizer step on one pass: ``accumulate`` and ``step``. Collective.

        Gradients of earlier passes are discarded. If the gradient is not finite, the step is skipped
        and the statistics report it.

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
        self.clock.begin()
        self.discard_gradients()
        update_pass = self.accumulate(
            batches, loss_function, temperature, load_balancing, is_last=True
        )
        update = self.step(AdamSettings.of(self.config, learning_rate))
        statistics = StepStatistics(**vars(update_pass), **vars(update))
        self._measure_speed(statistics, batches, started)
        self.memory.enter("between_phases")
        return statistics

    def accumulate(
        self,
        batches: Sequence[PackedBatch],
        loss_function: LossFunction,
        temperature: float = 1,
        load_balancing: float = 0,
        *,
        is_last: bool = False,
    ) -> PassStatistics:
        """Add the gradient of a loss to the gradients of earlier passes. Collective.

        If a pass fails, the next ``step`` fails, too: the sum lacks a part of the gradient.

        Args:
            batches: micro-batches of this data-parallel rank. All ranks pass the same number.
            loss_function: see LossFunction.
            temperature: divisor of the logits.
            load_balancing: see ``train_step``.
            is_last: reduce the gradients over ranks during the backward pass. Only a step may
                follow. Otherwise the step reduces them.

        Returns:
            Statistics of the pass, the same on all ranks except ``token_values``.

        Raises:
            RuntimeError: the gradients are already reduced.
            ValueError: there are no loads to balance, see ``ExpertLoads.balance``.
        """
        if self._is_reduced:
            raise RuntimeError("accumulate: the gradients are reduced. Take the step first")
        try:
            self._expert_loads.balance(batches, load_balancing)
            self.memory.enter("update")
            outputs = self._compute_gradients(batches, loss_function, temperature, is_last)
            self._is_reduced = is_last

            # Before the optimizer step, so that a skipped step has these figures, too.
            sums, maxima = self._reduce_outputs(outputs)
            if self.replay is not None:
                sums |= self.replay.agreement()
            return PassStatistics(
                sums=sums,
                maxima=maxima,
                expert_loads=self._expert_loads.take(),
                load_balancing_loss=self._expert_loads.balancing_loss(),
                token_values=gather_token_values(outputs, batches),
            )
        except Exception as error:
            self.fail_step(f"{type(error).__name__}: {error}")
            raise

    def fail_step(self, reason: str) -> None:
        """Let the next ``step`` fail, because a part of its gradient is missing."""
        self._failure = self._failure or reason

    def step(self, settings: AdamSettings) -> UpdateStatistics:
        """Update the parameters with the accumulated gradients. Collective.

        If the gradient is not finite, the step is skipped and the statistics report it. The gradients
        cannot be used again in any case.

        Args:
            settings: settings of this step.

        Raises:
            FloatingPointError: the gradient is not finite and ``on_non_finite`` is "stop".
            RuntimeError: a pass since the last step failed, or there was none.
        """
        passes, failure = self._passes, self._failure
        is_reduced = self._is_reduced
        self.discard_gradients()
        if failure is not None:
            raise RuntimeError(f"step: an earlier pass failed ({failure}). No parameter changed")
        if passes == 0:
            raise RuntimeError("step: there is no gradient. Run a pass with a loss first")
        if not is_reduced:
            reduce_gradients(self.model)

        update = UpdateStatistics(learning_rate=settings.learning_rate)
        self.clock.enter("optimizer")
        if self.config.offload_fraction:
            # Activations leave blocks in torch's cache. Few parts of the state fit into them, and
            # NCCL cannot use them at all.
            release_cached_memory()
        self.memory.enter("optimizer")
        # The check is collective, so all ranks make the same decision.
        if self._gradients_are_finite():
            self._update_parameters(update, settings)
        else:
            self._report_non_finite_gradients(update)
        self.clock.leave()
        return update

    def discard_gradients(self) -> None:
        """Forget all passes since the last step. The next pass resets the gradients."""
        self._passes = 0
        self._is_reduced = False
        self._failure = None

    def unfinished_step(self) -> UnfinishedStep:
        """Copy the state between the passes of a step to host memory.

        Raises:
            RuntimeError: the gradients are already reduced.
        """
        if self._is_reduced:
            raise RuntimeError("unfinished_step: the gradients are reduced. Take the step first")
        gradients = copy_gradients(self.model) if self._passes else []
        return UnfinishedStep(self._passes, self._failure, gradients)

    def continue_step(self, step: UnfinishedStep) -> None:
        """Continue a step from a result of ``unfinished_step``."""
        self.discard_gradients()
        if step.passes:
            # After an optimizer step, gradients of parameters share memory with the buffers.
            self._reset_gradients()
            load_gradients(self.model, step.gradients)
        self._passes = step.passes
        self._failure = step.failure

    def _compute_gradients(
        self,
        batches: Sequence[PackedBatch],
        loss_function: LossFunction,
        temperature: float,
        reduce: bool,
    ) -> list[LossOutput]:
        """Run forward and backward passes of all micro-batches.

        Returns:
            The output of the loss for each micro-batch, on the last pipeline stage only.
        """
        self.module.train()
        if self._passes == 0:
            self._reset_gradients()
        self._passes += 1

        # Megatron takes the second result for a number of tokens to divide by, which
        # finalize_gradients prevents.
        def loss(values: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, LossOutput]:
            output = loss_function(*_loss_arguments(values, batch))
            return output.loss, torch.ones((), dtype=torch.int), output

        with nullcontext() if reduce else without_reduction(self.model):
            return self._run_schedule(
                batches,
                self._training_head(temperature),
                loss,
                forward_only=False,
            )

    def _reset_gradients(self) -> None:
        """Set all gradients to 0."""
        # Zero Megatron's buffers, too: the optimizer zeroes only the part that it updates.
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _training_head(self, temperature: float) -> Head:
        """Return the function that computes the tensors for ``loss_function``.

        For a policy these are log-probs and entropy, stacked as [2, labels]. For batches with
        ``teacher_top_ids`` [labels, k] they are followed by the log-probs of these ids: [2 + k, labels].
        """

        def head(hidden: Tensor, weight: Tensor, group: Any, batch: PackedBatch) -> Tensor:
            if batch.teacher_top_ids is None:
                return torch.stack(label_log_probs(hidden, weight, batch, temperature, group))
            # Not once for each pair of token and label, because the teacher's ids may differ.
            log_probs, entropy, teacher_token_log_probs = log_probs_with_candidates(
                batch.at_labels(hidden),
                weight,
                batch.labels,
                batch.teacher_top_ids.long(),
                temperature,
                group,
            )
            return torch.cat([torch.stack([log_probs, entropy]), teacher_token_log_probs.t()])

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

    def _update_parameters(self, update: UpdateStatistics, settings: AdamSettings) -> None:
        """Take the optimizer step and add its results to the statistics."""
        apply_settings(self.optimizer, settings)
        updated, grad_norm, _ = self.optimizer.step()
        update.parameters_updated = bool(updated)
        update.grad_norm = float(grad_norm)
        self.updated |= update.parameters_updated

    def _report_non_finite_gradients(self, update: UpdateStatistics) -> None:
        """Add the parameters to the statistics, and log a warning or raise an error. Collective."""
        update.non_finite_gradients = describe_non_finite_gradients(self.chunks)
        if self.config.on_non_finite == "stop":
            raise FloatingPointError(update.non_finite_gradients)
        logger.warning("optimizer step skipped: %s", update.non_finite_gradients)

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
