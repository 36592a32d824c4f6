"""Evaluation of a policy on held-out conversations: sampled turns, and log-probs of the references.

Every turn is sampled after the true history, so a mistake does not change later turns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.evaluation.chat_statistics import chat_figures, chat_metrics
from rl_loop.evaluation.evaluate import evaluation_record
from rl_loop.rollout.group_stream import GroupRequest
from rl_loop.tasks.chat_turns import HeldOutChats
from rl_loop.tracking.recorder import StepRecord
from rl_loop.weight_sync.canary import CanaryTolerance, CheckedEngines, CheckedTrainer, check_sync
from rl_loop.weight_sync.source import WeightSource


def chat_requests(
    chats: HeldOutChats, samples_per_turn: int, temperature: float
) -> list[GroupRequest]:
    """Return requests for samples of every turn, with the same seeds in every call."""
    seeds = tuple(range(samples_per_turn))
    return [GroupRequest(turn.task, seeds, temperature) for turn in chats.turns]


def chat_records(
    chats: HeldOutChats, groups: Sequence[TrajectoryGroup], log_probs: np.ndarray | None
) -> list[dict[str, Any]]:
    """Return one record per sampled turn: those of ``evaluation_record``, and the reference.

    Args:
        chats: conversations.
        groups: sampled turns, in the order of ``chats.turns``.
        log_probs: log-probs of the conversations' tokens, in nats. None if they are unknown.
    """
    references: Sequence[float | None] = [None] * len(chats.turns)
    if log_probs is not None:
        references = chats.reference_log_probs(log_probs)

    records = []
    for turn, group, reference in zip(chats.turns, groups, references, strict=True):
        for sample, episode in enumerate(group.trajectories):
            records.append(
                evaluation_record(turn.task, sample, episode)
                | {
                    "conversation": turn.conversation,
                    "expected": turn.task.ground_truth,
                    "reference_tokens": turn.end - turn.start,
                    "reference_log_prob": reference,
                }
            )
    return records


def score_conversations(
    score: Callable[[Sequence[list[int]]], Sequence[Sequence[float]]], chats: HeldOutChats
) -> np.ndarray:
    """Return log-probs of the conversations' tokens from engines, in nats: [tokens].

    Args:
        score: returns the log-probs of all tokens but the first of each sequence.
        chats: conversations.
    """
    sequences = [ids.tolist() for ids in chats.samples.rows("token_ids")]
    # A first token has no log-prob, and is in no turn.
    return np.concatenate([[0.0, *scores] for scores in score(sequences)])


# ---- during training


class ChatTrainer(CheckedTrainer, WeightSource, Protocol):
    """Interface of the trainer. TrainerGroup implements it."""

    def score(self, samples: TrainingSamples, temperature: float | None = None) -> np.ndarray: ...


class ChatEngines(CheckedEngines, Protocol):
    """Interface of the engines. RolloutPool implements it."""

    def sync_weights(self, source: WeightSource, version: int) -> None: ...

    def run(self, requests: Sequence[GroupRequest]) -> list[TrajectoryGroup]: ...

    def pause(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class ChatValidation:
    """Measures the trainer's weights on held-out conversations."""

    trainer: ChatTrainer
    engines: ChatEngines
    chats: HeldOutChats
    temperature: float
    """Sampling temperature."""
    tolerance: CanaryTolerance
    """Allowed difference between engine and trainer."""
    sequences_at_a_time: int
    """Maximum number of sequences in a forward pass."""
    is_quantized: bool
    """If True, the run has quantized experts to compare."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Figures of the last measurement for the run's summary."""

    def measure(self, record: StepRecord, version: int) -> list[TrajectoryGroup]:
        """Sample all turns with the trainer's weights, and add the metrics to ``record``.

        Args:
            record: receives the metrics.
            version: number of completed steps.

        Returns:
            The sampled turns.

        Raises:
            CanaryError: an engine differs from the trainer.
        """
        samples = self.chats.samples
        with record.timed_evaluation("sync"):
            self.engines.sync_weights(self.trainer, version)
            canary = samples.rows("token_ids")[0].tolist()
            result = check_sync(
                self.trainer,
                self.engines,
                canary,
                tolerance=self.tolerance,
                version=version,
                is_quantized=self.is_quantized,
            )
        record.evaluation.add("mismatch/canary_gap", result.canary_gap, "max", "tokens")

        with record.timed_evaluation("evaluate"):
            requests = chat_requests(self.chats, 1, self.temperature)
            groups = self.engines.run(requests)
            # Engines on the trainer's GPUs sleep during the steps.
            self.engines.pause()
        with record.timed_evaluation("validate"):
            records = chat_records(self.chats, groups, self._reference_log_probs())
        for name, value in chat_metrics(records).items():
            record.evaluation.add(name, value, "last", "turns")
        self.figures = chat_figures(records)
        return groups

    def _reference_log_probs(self) -> np.ndarray:
        samples, at_a_time = self.chats.samples, self.sequences_at_a_time
        # As in the validation loss, Ray's store may not have space for more sequences.
        parts = [
            samples.take(range(first, min(len(samples), first + at_a_time)))
            for first in range(0, len(samples), at_a_time)
        ]
        return np.concatenate([self.trainer.score(part) for part in parts])
