"""Group-relative advantages: how much better a sample is than the other samples of its task."""

from __future__ import annotations

from typing import Literal

import torch

AdvantageEstimator = Literal["grpo", "dr_grpo", "leave_one_out"]


def group_advantages(
    rewards: torch.Tensor, estimator: AdvantageEstimator = "grpo", epsilon: float = 1e-6
) -> torch.Tensor:
    """rewards: [samples] of one task -> advantages [samples], fp32.

    - ``grpo``: (R - mean) / (std + epsilon), with the population standard deviation
      (arXiv 2402.03300, section 4.1.2).
    - ``dr_grpo``: R - mean; no division, which would favour tasks that are almost always or never solved
      (arXiv 2503.20783).
    - ``leave_one_out``: R minus the mean of the *other* samples, an unbiased baseline (RLOO, arXiv 2402.14740);
      equal to samples / (samples - 1) times ``dr_grpo``.

    A group of one sample, or one in which all rewards are equal, has advantage 0.
    """
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(f"rewards must be a non-empty vector, got shape {tuple(rewards.shape)}")
    rewards = rewards.float()
    centred = rewards - rewards.mean()
    if len(rewards) == 1:
        return torch.zeros_like(rewards)
    if estimator == "grpo":
        return centred / (rewards.std(unbiased=False) + epsilon)
    if estimator == "dr_grpo":
        return centred
    if estimator == "leave_one_out":
        return centred * (len(rewards) / (len(rewards) - 1))
    raise ValueError(f"unknown advantage estimator {estimator!r}")
