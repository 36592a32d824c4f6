"""Reward shaping: terms that are added to the rewards of a task's episodes before advantages.

A term sees all valid episodes of a task together, so it can compare them. It returns one number per
episode. docs/rewards.md shows how to write one.
"""

import math
from collections.abc import Sequence

import torch

from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.registry import SHAPING_TERMS
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup


def relative_length(episodes: Sequence[Trajectory]) -> list[float]:
    """Return (tokens of the shortest correct episode) / (own tokens) for correct episodes, else 0.

    A wrong episode never gains, and a correct one never has less than a wrong one. Tokens are the
    sampled tokens of an episode, without prompt and tool outputs.

    Example:
        >>> def episode(tokens, correct):
        ...     columns = {"token_ids": [0] * tokens, "loss_mask": [1] * tokens}
        ...     log_probs = [-1.0] * tokens
        ...     parts = {"correct": correct}
        ...     return Trajectory("t", **columns, rollout_log_probs=log_probs, reward_parts=parts)
        >>> relative_length([episode(10, 1.0), episode(40, 1.0), episode(5, 0.0)])
        [1.0, 0.25, 0.0]
    """
    tokens = [max(1, episode.episode_sampled_tokens) for episode in episodes]
    correct = [is_correct(episode) for episode in episodes]
    shortest = min((n for n, right in zip(tokens, correct, strict=True) if right), default=0)
    return [shortest / n if right else 0.0 for n, right in zip(tokens, correct, strict=True)]


def part(episodes: Sequence[Trajectory], *, name: str) -> list[float]:
    """Return a reward part of every episode, 0 for an episode without it."""
    return [episode.reward_parts.get(name, 0.0) for episode in episodes]


def is_correct(episode: Trajectory) -> bool:
    """Return True if the environment judged the episode as correct."""
    return bool(episode.reward_parts.get("correct", 0.0))


def shaping_terms(groups: Sequence[TrajectoryGroup], config: AlgorithmConfig) -> torch.Tensor:
    """Compute the terms of ``config.shaping`` without weights: fp64 [episodes, terms].

    Raises:
        ValueError: a function does not return one finite number per episode.
    """
    episodes = [group.trajectories for group in groups if group.trajectories]
    count = sum(map(len, episodes))
    columns = []
    for name, term in config.shaping.items():
        compute = SHAPING_TERMS.resolve(term.type)
        column = [
            value
            for of_task in episodes
            for value in _check_values(name, compute(of_task, **term.options), of_task)
        ]
        columns.append(torch.tensor(column, dtype=torch.float64))
    return torch.stack(columns, dim=1) if columns else torch.zeros(count, 0, dtype=torch.float64)


def _check_values(
    name: str, values: Sequence[float], episodes: Sequence[Trajectory]
) -> list[float]:
    """Return the values of one task. Raises ValueError if they are not one number per episode."""
    # Also accepts arrays and tensors of one dimension.
    numbers = [float(value) for value in values]
    if len(numbers) != len(episodes) or not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"algorithm.shaping.{name} returned {numbers} for task {episodes[0].task_id}, expected "
            f"{len(episodes)} finite numbers, one per episode"
        )
    return numbers
