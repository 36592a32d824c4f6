"""Recorded episodes without a run: complete Harmony turns with a small vocabulary."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from rl_loop.data.response_check import TrainedTokens
from rl_loop.data.trajectory import (
    FinishReason,
    InvalidReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
    WeightVersionSpan,
)
from rl_loop.tracking.episode_recorder import EpisodeRecorder
from rl_loop.tracking.episode_table import SplitEpisodes

SPECIAL = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]
WORDS = ["system", "user", "assistant", "python", " to=python", "analysis", "commentary", "final"]
DIGITS = [str(digit) for digit in range(10)]
OTHERS = ["Compute ", "print(", ")", " + ", "The answer is ", "\n", " to=assistant", "<i>bold</i>"]


DURATIONS = {"prompt": (None, None), "assistant": (0.5, 0.25), "tool": (1.5, 0.0)}
"""Seconds of a turn by its role, and seconds that it waited."""


class Words:
    """A vocabulary of whole words."""

    def __init__(self, texts: Sequence[str] = (*SPECIAL, *WORDS, *DIGITS, *OTHERS)) -> None:
        self.texts = list(texts)
        self.size = len(self.texts)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.texts[i] for i in ids)

    def encode(self, *texts: str) -> list[int]:
        return [self.texts.index(text) for text in texts]


VOCABULARY = Words()


def solved(task: str, *, reward: float = 1.0, version: int = 0, digit: int = 4) -> Trajectory:
    """Return an episode with a prompt, a call of Python, its output and a final answer."""
    turns: list[tuple[str, list[str]]] = [
        ("prompt", ["<|start|>", "user", "<|message|>", "Compute ", "2", " + ", "2", "<|end|>"]),
        ("prompt", ["<|start|>", "assistant"]),
        ("assistant", ["<|channel|>", "commentary", " to=python", "<|message|>"]),
        ("assistant", ["print(", "2", " + ", "2", ")", "<|call|>"]),
        ("tool", ["<|start|>", "python", " to=assistant", "<|channel|>", "commentary"]),
        ("tool", ["<|message|>", str(digit), "<|end|>", "<|start|>", "assistant"]),
        ("assistant", ["<|channel|>", "final", "<|message|>", "The answer is ", str(digit)]),
        ("assistant", ["<|return|>"]),
    ]
    ids: list[int] = []
    mask: list[int] = []
    recorded: list[Turn] = []
    for role, texts in turns:
        start = len(ids)
        ids += VOCABULARY.encode(*texts)
        mask += [int(role == "assistant")] * len(texts)
        seconds, waited = DURATIONS[role]
        recorded.append(Turn(role, start, len(ids), "".join(texts), seconds, waited))
    spans = [
        WeightVersionSpan(turn.start, turn.end, version)
        for turn in recorded
        if turn.role == "assistant"
    ]
    return Trajectory(
        task,
        token_ids=ids,
        loss_mask=mask,
        rollout_log_probs=[-0.125 * on for on in mask],
        weight_versions=spans,
        turns=recorded,
        reward=reward,
        reward_parts={"correct": float(reward > 0), "format_error": 0.0},
        tool_calls=1,
        tool_errors=int(reward <= 0),
        finish_reason=FinishReason.STOP if reward > 0 else FinishReason.MAX_TURNS,
        answer=str(digit),
        expected_answer="4",
    )


def failed(task: str) -> Trajectory:
    """Return an episode that ended with an infrastructure failure."""
    episode = solved(task, reward=float("nan"))
    episode.invalid = InvalidReason("sandbox", "bwrap: no memory")
    return episode


def groups_of_step(step: int, tasks: int = 2, samples: int = 2) -> list[TrajectoryGroup]:
    """Return groups in which the first episode succeeds and the others fail."""
    groups = []
    for number in range(tasks):
        task = f"sum/{step}-{number}"
        episodes = [
            solved(task, reward=1.0 if i == 0 else -1.0, version=step, digit=(4 + i) % 10)
            for i in range(samples)
        ]
        groups.append(TrajectoryGroup(task, episodes))
    return groups


def build_samples(groups: Sequence[TrajectoryGroup]) -> TrainingSamples:
    """Return the training samples of groups. The advantage is the reward."""
    episodes = [episode for group in groups for episode in group.trajectories]
    return TrainingSamples.join(
        [
            {
                "token_ids": episode.token_ids,
                "loss_mask": episode.loss_mask,
                "advantages": np.where(episode.loss_mask, episode.reward, 0).astype(np.float32),
                "rollout_log_probs": episode.rollout_log_probs,
            }
            for episode in episodes
        ],
        names=[episode.task_id for episode in episodes],
    )


def train_split(groups: Sequence[TrajectoryGroup]) -> SplitEpisodes:
    """Return the record of trained groups. The trainer's log-probs differ by 0.25 nats."""
    samples = build_samples(groups)
    assert samples.rollout_log_probs is not None
    trainer = np.where(samples.loss_mask, samples.rollout_log_probs - 0.25, 0).astype(np.float32)
    entropy = samples.loss_mask.astype(np.float32)
    return SplitEpisodes("train", groups, samples, TrainedTokens(trainer, entropy))


def record_steps(directory: Path, steps: Sequence[int], tasks: int = 2, samples: int = 2) -> None:
    """Record complete steps, like the loop."""
    with EpisodeRecorder(directory, VOCABULARY, "all") as recorder:
        for step in steps:
            recorder.record(step, [train_split(groups_of_step(step, tasks, samples))])
