"""Data of supervised fine-tuning: conversations from files, or generated demonstrations."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from rl_loop.config.training import DemonstrationConfig
from rl_loop.conversations.dataset import ConversationData, ConversationStream
from rl_loop.conversations.rejections import RejectionReport
from rl_loop.tracking.metrics import StepMetrics
from rl_loop.trainer.checkpointer import RunState


class SupervisedData(Protocol):
    """Samples of every step, and of validation.

    The order of calls is ``check``, ``continue_from``, ``start``, then steps, then ``close``.
    """

    @property
    def validation(self) -> Mapping[str, TrainingSamples]:
        """Validation samples by source. Empty without validation."""
        ...

    @property
    def validate_every(self) -> int:
        """Steps between two validations."""
        ...

    @property
    def held_out_chats(self) -> Mapping[str, TrainingSamples]:
        """Validation conversations by source, with the assistant's turns in the loss."""
        ...

    @property
    def exhausted(self) -> bool:
        """True if no samples are left for a further step."""
        ...

    def check(self) -> None:
        """Check the beginning of the data, before anything heavy starts."""
        ...

    def continue_from(self, state: RunState) -> None:
        """Continue where a checkpoint stopped."""
        ...

    def start(self, report: RejectionReport) -> None:
        """Prepare validation and the first samples. ``report`` collects rejected conversations."""
        ...

    def take(self, step: int) -> TrainingSamples:
        """Return the samples of a step."""
        ...

    def state(self) -> dict[str, Any] | None:
        """Return the position in the conversations for a checkpoint, as JSON."""
        ...

    def task_cursor(self, step: int) -> dict[str, Any] | None:
        """Return the position in the data of tasks after ``step`` steps, as JSON."""
        ...

    def add_metrics(self, metrics: StepMetrics) -> None:
        """Add the share of the data that was used."""
        ...

    def summary(self) -> dict[str, Any]:
        """Return values of the whole run for ``summary.json``."""
        ...

    def close(self) -> None:
        """End the processes that render."""
        ...


class DemonstrationSource(Protocol):
    """Source of demonstrations: a TaskMixture."""

    def check_demonstrations(self) -> None: ...

    def continue_from(self, cursor: Mapping[str, Any]) -> None: ...

    def cursor(self, position: int) -> dict[str, Any]: ...

    def demonstrations(
        self, position: int, count: int, mixture: DemonstrationConfig
    ) -> TrainingSamples: ...


class DemonstrationBatches:
    """Demonstrations on tasks. They never end, and have no validation."""

    exhausted = False
    validation: Mapping[str, TrainingSamples] = {}
    held_out_chats: Mapping[str, TrainingSamples] = {}
    validate_every = 1

    def __init__(
        self,
        tasks: DemonstrationSource,
        mixture: DemonstrationConfig,
        sequences_per_step: int,
        all_tokens: bool = False,
    ) -> None:
        """Use the demonstrations of tasks.

        Args:
            tasks: source of the demonstrations.
            mixture: mixture of demonstrations.
            sequences_per_step: demonstrations per step.
            all_tokens: whether every token is in the loss.
        """
        self._all_tokens = all_tokens
        self._tasks = tasks
        self._mixture = mixture
        self._count = sequences_per_step

    def check(self) -> None:
        """Demonstrate one task of every source. Raises TaskFileError."""
        self._tasks.check_demonstrations()

    def continue_from(self, state: RunState) -> None:
        """Continue with the tasks where a checkpoint stopped. Raises TaskFileError."""
        if state.tasks is not None:
            self._tasks.continue_from(state.tasks)

    def start(self, report: RejectionReport) -> None:
        """Prepare nothing."""

    def take(self, step: int) -> TrainingSamples:
        """Make the demonstrations of a step."""
        # By position, so that a resumed run continues with the next demonstrations.
        samples = self._tasks.demonstrations(step * self._count, self._count, self._mixture)
        return with_all_tokens(samples) if self._all_tokens else samples

    def state(self) -> None:
        """Return None: there are no conversations."""

    def task_cursor(self, step: int) -> dict[str, Any]:
        """Return the position in the data of tasks after ``step`` steps, as JSON."""
        return self._tasks.cursor(step * self._count)

    def add_metrics(self, metrics: StepMetrics) -> None:
        """Add nothing."""

    def summary(self) -> dict[str, Any]:
        """Return no values."""
        return {}

    def close(self) -> None:
        """Close nothing."""


class ConversationBatches:
    """Conversations of files."""

    validation: Mapping[str, TrainingSamples]
    held_out_chats: Mapping[str, TrainingSamples]
    _stream: ConversationStream

    def __init__(
        self, data: ConversationData, sequences_per_step: int, all_tokens: bool = False
    ) -> None:
        """Use conversations.

        Args:
            data: conversations of all sources.
            sequences_per_step: samples per step.
            all_tokens: whether every token is in the loss, and in the validation loss.
        """
        self._all_tokens = all_tokens
        self.validate_every = data.config.validate_every
        self._data = data
        self._count = sequences_per_step
        # Kept from ``continue_from`` until ``start``, which opens the stream.
        self._saved: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Render the beginning of every source. Raises DataError."""
        self._data.check()

    def continue_from(self, state: RunState) -> None:
        """Continue with the conversations where a checkpoint stopped."""
        self._saved = state.data

    def start(self, report: RejectionReport) -> None:
        """Render the validation samples, and begin to render training samples. Raises DataError."""
        self.validation = self.held_out_chats = self._data.validation(report)
        if self._all_tokens:
            self.validation = {
                name: with_all_tokens(samples) for name, samples in self.validation.items()
            }
        self._stream = self._data.stream(report, self._saved)

    @property
    def exhausted(self) -> bool:
        """True if every source has completed its passes."""
        return self._stream.exhausted

    def take(self, step: int) -> TrainingSamples:
        """Return the next samples. The last step of the data may have fewer than others."""
        samples = self._stream.take(self._count)
        assert samples is not None, "the caller checks ``exhausted`` before"
        return with_all_tokens(samples) if self._all_tokens else samples

    def state(self) -> dict[str, Any]:
        """Return the position of the stream."""
        return self._stream.state()

    def task_cursor(self, step: int) -> None:
        """Return None: there are no tasks."""

    def add_metrics(self, metrics: StepMetrics) -> None:
        """Add the pass over each source, from 0, and the number of rejected conversations."""
        streams = self._stream.streams
        for stream in streams:
            name = "data/epoch" if len(streams) == 1 else f"data/epoch/{stream.name}"
            metrics.add(name, stream.epoch, "last")
        metrics.add("data/rejected", sum(stream.rejected for stream in streams), "last")

    def summary(self) -> dict[str, Any]:
        """Return the numbers of conversations that were read and rejected in the first pass."""
        streams = self._stream.streams
        return {
            "conversations": sum(stream.conversations for stream in streams),
            "refused": sum(stream.rejected for stream in streams),
        }

    def close(self) -> None:
        """End the processes that render."""
        self._data.close()


def with_all_tokens(samples: TrainingSamples) -> TrainingSamples:
    """Return samples with every token in the loss, except the first, which is not predicted."""
    loss_mask = np.ones(samples.tokens, dtype=np.bool_)
    loss_mask[samples.offsets[:-1]] = False
    return samples.with_columns(loss_mask=loss_mask)
