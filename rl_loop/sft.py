"""Loop of supervised fine-tuning."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import StepStatistics
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.supervised_data import SupervisedData
from rl_loop.tracking.metrics import MetricName
from rl_loop.tracking.recorder import StepRecord, StepRecorder
from rl_loop.tracking.step_metrics import add_optimizer_metrics
from rl_loop.trainer.checkpointer import Checkpointer

DISTILLATION_METRICS = "distillation/"
"""Prefix of the names of metrics that the distillation loss returns."""
TEACHER_VALIDATION_LOSS = "validation/teacher_loss"
"""Name of the metric for the cross-entropy of the teacher."""


class SftTrainer(Protocol):
    """Interface of the trainer that this loop needs. TrainerGroup implements it."""

    def sft_step(self, samples: TrainingSamples, step: int) -> StepStatistics: ...

    def score(self, samples: TrainingSamples) -> np.ndarray: ...

    def teacher_score(self, samples: TrainingSamples) -> np.ndarray | None: ...


class ValidationSampler(Protocol):
    """Samples turns of held-out conversations (``rl_loop.evaluation.chats``)."""

    def measure(self, record: StepRecord, version: int) -> Sequence[TrajectoryGroup]: ...


def train_supervised(
    trainer: SftTrainer,
    data: SupervisedData,
    recorder: StepRecorder,
    checkpointer: Checkpointer,
    *,
    steps: int,
    sequences_per_step: int,
    chats: ValidationSampler | None = None,
) -> int:
    """Run the remaining steps. Measure the validation loss regularly and at the end.

    Args:
        trainer: takes the steps.
        data: samples for steps and validation.
        recorder: writes metrics.
        checkpointer: saves the run. Its state has the number of completed steps.
        steps: number of steps of the whole run.
        sequences_per_step: sequences of a step, and of a forward pass in validation.
        chats: samples turns of held-out conversations in every validation. None to sample none.

    Returns:
        Number of completed steps. It is below ``steps`` if the run was interrupted or the data is
        exhausted.
    """
    state = checkpointer.state
    interrupted = False

    def validate(record: StepRecord) -> Sequence[TrajectoryGroup]:
        """Add the metrics of a validation, and return the turns that it sampled."""
        add_validation_loss(record, trainer, data.validation, sequences_per_step)
        return [] if chats is None else chats.measure(record, state.step)

    while state.step < steps and not data.exhausted and not interrupted:
        record = recorder.begin_step(state.step)
        sampled: Sequence[TrajectoryGroup] = ()
        # Validate before the update, so that the curve begins with the initial weights.
        if data.validation and state.step % data.validate_every == 0:
            sampled = validate(record)

        with record.time_phase("data"):
            samples = data.take(state.step)
        recorder.progress.phase("update")
        update = trainer.sft_step(samples, state.step)

        tokens = update.sums["tokens"]
        record.metrics.add_mean(MetricName.LOSS, update.sums["loss"], tokens, "tokens")
        for name, total in update.sums.items():
            if name.startswith(DISTILLATION_METRICS):
                record.metrics.add_mean(name, total, tokens, "tokens")
        add_optimizer_metrics(record.metrics, update)
        data.add_metrics(record.metrics)
        recorder.record_sft_step(record, samples, sampled)

        # Set before ``end_step``, which may save the state.
        state.data = data.state()
        is_last = checkpointer.end_step(data_exhausted=data.exhausted)
        # The step is also the last one if no steps or no data are left. An interrupted run skips the
        # final validation, because the resumed run measures it.
        interrupted = is_last and state.step < steps and not data.exhausted

    if data.validation and not interrupted:
        record = recorder.begin_step(state.step)
        recorder.record_validation(record, validate(record))
    return state.step


def add_validation_loss(
    record: StepRecord,
    trainer: SftTrainer,
    validation: Mapping[str, TrainingSamples],
    sequences_at_a_time: int,
) -> None:
    """Measure the cross-entropy of all sources and of each source, in nats per token in the loss.

    If there is a teacher, also measure the cross-entropy of the teacher for all sources.

    Args:
        record: receives the metrics.
        trainer: computes log-probs.
        validation: validation samples by source.
        sequences_at_a_time: maximum number of sequences in a forward pass.
    """
    with record.timed_evaluation("validate"):
        for name, samples in validation.items():
            total, tokens = 0.0, 0
            # Ray's object store may not have space for more sequences than those of one step.
            for first in range(0, len(samples), sequences_at_a_time):
                part = samples.take(range(first, min(len(samples), first + sequences_at_a_time)))
                log_probs = trainer.score(part)[part.loss_mask]
                # An fp32 sum over many tokens would lose digits.
                total -= float(log_probs.sum(dtype=np.float64))
                tokens += len(log_probs)
                teacher_log_probs = trainer.teacher_score(part)
                if teacher_log_probs is not None:
                    loss = -float(teacher_log_probs[part.loss_mask].sum(dtype=np.float64))
                    record.evaluation.add_mean(
                        TEACHER_VALIDATION_LOSS, loss, len(log_probs), "tokens"
                    )

            record.evaluation.add_mean(MetricName.VALIDATION_LOSS, total, tokens, "tokens")
            if len(validation) > 1:
                by_source = f"{MetricName.VALIDATION_LOSS}/{name}"
                record.evaluation.add_mean(by_source, total, tokens, "tokens")
