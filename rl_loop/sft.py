"""Steps of supervised fine-tuning."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import StepStatistics
from rl_loop.supervised_data import SupervisedData
from rl_loop.tracking.metrics import MetricName
from rl_loop.tracking.recorder import StepRecord, StepRecorder
from rl_loop.tracking.step_metrics import add_optimizer_metrics
from rl_loop.trainer.checkpointer import Checkpointer

DISTILLATION_METRICS = "distillation/"
"""Prefix of a distillation loss's sums over the tokens in the loss."""
TEACHER_VALIDATION_LOSS = "validation/teacher_loss"
"""Metric of the teacher's cross-entropy."""


class SftTrainer(Protocol):
    """Trainer that takes optimizer steps and computes log-probs: a TrainerGroup."""

    def sft_step(self, samples: TrainingSamples, step: int) -> StepStatistics: ...

    def score(self, samples: TrainingSamples) -> np.ndarray: ...

    def teacher_score(self, samples: TrainingSamples) -> np.ndarray | None: ...


def train_supervised(
    trainer: SftTrainer,
    data: SupervisedData,
    recorder: StepRecorder,
    checkpointer: Checkpointer,
    *,
    steps: int,
    sequences_per_step: int,
) -> int:
    """Run all steps that are left, and measure the validation loss in between and at the end.

    Args:
        trainer: takes the steps.
        data: samples for steps and validation.
        recorder: writes metrics.
        checkpointer: saves the run, and knows the step to continue from.
        steps: steps in the run.
        sequences_per_step: number of sequences that are validated at a time.

    Returns:
        Number of completed steps. It is below ``steps`` if the run was interrupted or the data is
        exhausted.
    """
    state = checkpointer.state
    interrupted = False
    while state.step < steps and not data.exhausted and not interrupted:
        record = recorder.begin_step(state.step)
        # Validate before the update, so that the curve begins with the initial weights.
        if data.validation and state.step % data.validate_every == 0:
            add_validation_loss(record, trainer, data.validation, sequences_per_step)

        with record.timed("data"):
            samples = data.take(state.step)
        recorder.progress.phase("train")
        update = trainer.sft_step(samples, state.step)

        tokens = update.sums["tokens"]
        record.metrics.add_mean(MetricName.LOSS, update.sums["loss"], tokens, "tokens")
        for name, total in update.sums.items():
            if name.startswith(DISTILLATION_METRICS):
                record.metrics.add_mean(name, total, tokens, "tokens")
        add_optimizer_metrics(record.metrics, update)
        data.add_metrics(record.metrics)
        recorder.record_sft_step(record, tokens=samples.tokens)

        # Set before ``end_step``, which may save the state.
        state.data = data.state()
        ends = checkpointer.end_step(data_exhausted=data.exhausted)
        # ``end_step`` returns True at the end of steps or data, too. Only an interrupted run skips
        # the final validation, because its resume takes it.
        interrupted = ends and state.step < steps and not data.exhausted

    if data.validation and not interrupted:
        record = recorder.begin_step(state.step)
        add_validation_loss(record, trainer, data.validation, sequences_per_step)
        recorder.record_validation(record)
    return state.step


def add_validation_loss(
    record: StepRecord,
    trainer: SftTrainer,
    validation: Mapping[str, TrainingSamples],
    sequences_at_a_time: int,
) -> None:
    """Measure the cross-entropy, in nats per token in the loss, in total and for each source.

    With a teacher, also measure the teacher's.

    Args:
        record: gets the metrics.
        trainer: computes log-probs.
        validation: validation samples by source.
        sequences_at_a_time: maximum sequences of one pass.
    """
    with record.timed_evaluation("validate"):
        for name, samples in validation.items():
            total, tokens = 0.0, 0
            # Ray's store has space for the sequences of one step.
            for first in range(0, len(samples), sequences_at_a_time):
                part = samples.take(range(first, min(len(samples), first + sequences_at_a_time)))
                log_probs = trainer.score(part)[part.loss_mask]
                # An fp32 sum over many tokens would lose digits.
                total -= float(log_probs.sum(dtype=np.float64))
                tokens += len(log_probs)
                of_teacher = trainer.teacher_score(part)
                if of_teacher is not None:
                    loss = -float(of_teacher[part.loss_mask].sum(dtype=np.float64))
                    record.evaluation.add_mean(
                        TEACHER_VALIDATION_LOSS, loss, len(log_probs), "tokens"
                    )

            record.evaluation.add_mean(MetricName.VALIDATION_LOSS, total, tokens, "tokens")
            if len(validation) > 1:
                by_source = f"{MetricName.VALIDATION_LOSS}/{name}"
                record.evaluation.add_mean(by_source, total, tokens, "tokens")
