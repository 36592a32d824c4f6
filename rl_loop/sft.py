"""The steps of supervised fine-tuning, on conversations or on generated demonstrations."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import StepStatistics
from rl_loop.config.training import DemonstrationConfig
from rl_loop.conversations.dataset import ConversationData
from rl_loop.conversations.refusals import RefusalReport
from rl_loop.tracking.metrics import Name, StepMetrics
from rl_loop.tracking.recorder import StepRecord, StepRecorder
from rl_loop.tracking.step_metrics import add_optimizer_metrics
from rl_loop.trainer.checkpointer import Checkpointer


class Trainer(Protocol):
    """Takes optimizer steps and scores: a TrainerGroup."""

    def sft_step(self, samples: TrainingSamples, step: int) -> StepStatistics: ...

    def score(self, samples: TrainingSamples) -> np.ndarray: ...


class TaskDemonstrations(Protocol):
    """Makes demonstrations: a TaskSource."""

    def demonstrations(
        self, position: int, count: int, mixture: DemonstrationConfig
    ) -> TrainingSamples: ...


class SupervisedData(Protocol):
    """What is learned, step by step, and what is measured."""

    validation: Mapping[str, TrainingSamples]
    """What the loss is measured on, by source; empty if it is not measured."""
    validate_every: int
    """Steps between measurements."""

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left for a further step."""
        ...

    def take(self, step: int) -> TrainingSamples:
        """Return the samples of a step."""
        ...

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps to go on behind the last step, as JSON."""
        ...

    def add_metrics(self, metrics: StepMetrics) -> None:
        """Add how far the data is used."""
        ...

    def summary(self) -> dict[str, Any]:
        """Return figures of the whole run."""
        ...


def train_supervised(
    trainer: Trainer,
    data: SupervisedData,
    recorder: StepRecorder,
    checkpointer: Checkpointer,
    *,
    steps: int,
    sequences_per_step: int,
) -> int:
    """Run all steps that are left, and measure the loss in between and at the end.

    Returns the number of steps done in all, fewer than ``steps`` if the run was interrupted or the
    data is exhausted."""
    state = checkpointer.state
    interrupted = False
    while state.step < steps and not data.exhausted and not interrupted:
        record = recorder.begin_step(state.step)
        if data.validation and state.step % data.validate_every == 0:
            add_validation_loss(record, trainer, data.validation, sequences_per_step)

        with record.timed("data"):
            samples = data.take(state.step)
        recorder.progress.phase("train")
        update = trainer.sft_step(samples, state.step)

        record.metrics.add_mean(Name.LOSS, update.sums["loss"], update.sums["tokens"], "tokens")
        add_optimizer_metrics(record.metrics, update)
        data.add_metrics(record.metrics)
        recorder.record_sft_step(record, tokens=samples.tokens)

        state.data = data.state()
        ends = checkpointer.end_step(data_exhausted=data.exhausted)
        interrupted = ends and state.step < steps and not data.exhausted

    if data.validation and not interrupted:
        record = recorder.begin_step(state.step)
        add_validation_loss(record, trainer, data.validation, sequences_per_step)
        recorder.record_validation(record)
    return state.step


def add_validation_loss(
    record: StepRecord,
    trainer: Trainer,
    validation: Mapping[str, TrainingSamples],
    sequences_at_a_time: int,
) -> None:
    """Measure the cross-entropy in nats per learned token, over all sources and for each."""
    with record.timed_evaluation("validate"):
        for name, samples in validation.items():
            total, tokens = 0.0, 0
            # As many at a time as in a step, which is what Ray's store has room for.
            for first in range(0, len(samples), sequences_at_a_time):
                part = samples.take(range(first, min(len(samples), first + sequences_at_a_time)))
                log_probs = trainer.score(part)[part.loss_mask]
                total -= float(log_probs.sum(dtype=np.float64))
                tokens += len(log_probs)

            record.evaluation.add_mean(Name.VALIDATION_LOSS, total, tokens, "tokens")
            if len(validation) > 1:
                by_source = f"{Name.VALIDATION_LOSS}/{name}"
                record.evaluation.add_mean(by_source, total, tokens, "tokens")


class DemonstrationBatches:
    """Demonstrations on tasks, as many as steps need."""

    exhausted = False
    validation: Mapping[str, TrainingSamples] = {}
    validate_every = 1

    def __init__(
        self, tasks: TaskDemonstrations, mixture: DemonstrationConfig, sequences_per_step: int
    ) -> None:
        self._tasks = tasks
        self._mixture = mixture
        self._count = sequences_per_step

    def take(self, step: int) -> TrainingSamples:
        """Make the demonstrations of a step."""
        # By position, so that a resumed run goes on with the demonstrations that come next.
        return self._tasks.demonstrations(step * self._count, self._count, self._mixture)

    def state(self) -> None:
        """Return None: the number of steps says it all."""

    def add_metrics(self, metrics: StepMetrics) -> None:
        """Add nothing: there is no end to demonstrations."""

    def summary(self) -> dict[str, Any]:
        """Return no figures."""
        return {}


class ConversationBatches:
    """Conversations of files, from where an earlier run has come to."""

    def __init__(
        self,
        data: ConversationData,
        report: RefusalReport,
        sequences_per_step: int,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """Render what the loss is measured on, and begin to render what is learned.

        ``saved``: the state to go on from. Raises DataError."""
        self.validation: Mapping[str, TrainingSamples] = data.validation(report)
        self.validate_every = data.config.validate_every
        self._count = sequences_per_step
        self._stream = data.stream(report, saved)

    @property
    def exhausted(self) -> bool:
        """Whether every source has been passed over as often as it is to be."""
        return self._stream.exhausted

    def take(self, step: int) -> TrainingSamples:
        """Return the next samples; at the very end there may be fewer than a step has."""
        samples = self._stream.take(self._count)
        assert samples is not None, "the caller asks whether anything is left"
        return samples

    def state(self) -> dict[str, Any]:
        """Return where the stream is."""
        return self._stream.state()

    def add_metrics(self, metrics: StepMetrics) -> None:
        """Add the pass over each source, from 0, and how many conversations were refused."""
        streams = self._stream.streams
        for stream in streams:
            name = "data/epoch" if len(streams) == 1 else f"data/epoch/{stream.name}"
            metrics.add(name, stream.epoch, "last")
        metrics.add("data/refused", sum(stream.refused for stream in streams), "last")

    def summary(self) -> dict[str, Any]:
        """Return how many conversations were read and refused in the first pass."""
        streams = self._stream.streams
        return {
            "conversations": sum(stream.conversations for stream in streams),
            "refused": sum(stream.refused for stream in streams),
        }
