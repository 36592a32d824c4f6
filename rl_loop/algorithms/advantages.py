"""Advantages: how much better an episode, or a token, is than what was to be expected."""

from collections.abc import Sequence
from typing import Literal

import torch

GroupEstimator = Literal["grpo", "dr_grpo", "leave_one_out"]


def group_advantages(rewards: torch.Tensor, estimator: GroupEstimator = "grpo", epsilon: float = 1e-6) -> torch.Tensor:
    """rewards: [samples] of one task -> advantages [samples], in fp32 at least.

    - ``grpo``: (R - mean) / (std + epsilon), population standard deviation (arXiv 2402.03300, section 4.1.2).
    - ``dr_grpo``: R - mean; no division, which favours tasks almost always or never solved (arXiv 2503.20783).
    - ``leave_one_out``: R minus the mean of the *other* samples, an unbiased baseline (RLOO, arXiv 2402.14740);
      equal to samples / (samples - 1) times ``dr_grpo``.

    A group of one sample, or one in which all rewards are equal, has advantage 0."""
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(f"rewards must be a non-empty vector, got shape {tuple(rewards.shape)}")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    centred = rewards - rewards.mean()
    if estimator == "grpo":
        return centred / (rewards.std(unbiased=False) + epsilon)
    scales = {"dr_grpo": 1.0, "leave_one_out": len(rewards) / max(1, len(rewards) - 1)}
    return centred * scales[estimator]


def gdpo_advantages(parts: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """parts: [samples, rewards] of one task -> sum_k w_k (r_k - mean_k) / (std_k + 1e-6), [samples] (arXiv 2601.05242).

    So a rare reward is not drowned by a common one. The batch is whitened afterwards (``whiten``)."""
    return torch.stack([w * group_advantages(parts[:, k], "grpo") for k, w in enumerate(weights)]).sum(dim=0)


def reinforce_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """rewards: [samples] of the whole batch -> R - mean: REINFORCE with a constant baseline (Williams, 1992)."""
    return rewards - rewards.mean()


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, [samples, time] each, from rewards and values [samples, time].

    A_t = sum_k (gamma lambda)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t, and return_t = A_t + V_t (GAE,
    arXiv 1506.02438, eq. 16). Time counts sampled tokens only: V_{t+1} is the value before the next token that the
    policy chose, whatever a tool said in between. Shorter samples are filled up with zeros, which change nothing."""
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    delta = rewards + gamma * following - values
    advantages = torch.zeros_like(delta)
    running = torch.zeros_like(delta[:, 0])
    for t in range(delta.shape[1] - 1, -1, -1):
        running = delta[:, t] + gamma * lam * running
        advantages[:, t] = running
    return advantages, advantages + values


def whiten(values: torch.Tensor, epsilon: float = 1e-8) -> torch.Tensor:
    """values: [n] -> mean 0 and, unless all are equal, standard deviation 1."""
    return (values - values.mean()) / (values.std(unbiased=False) + epsilon)


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """0 up to ``limit - buffer`` tokens, then linearly down to -1 at ``limit`` (DAPO, arXiv 2503.14476, eq. 13)."""
    return -min(1.0, max(0.0, (tokens - (limit - buffer)) / buffer))
