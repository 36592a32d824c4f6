"""The PPO policy loss on tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 20.0


@dataclass
class PolicyLoss:
    """All [tokens]; only ``loss`` carries a gradient."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor  # bool: the clipped branch was the active one


def ppo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor | None,
    advantages: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Per-token clipped surrogate, to be minimised.

    L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(log_probs - old_log_probs)
    (PPO, arXiv 1707.06347, eq. 7; separate bounds as in DAPO, arXiv 2503.14476, eq. 10);
    with ``dual_clip`` = c > 1 it is at most -c A where A < 0 (arXiv 1912.09729, eq. 5).

    ``old_log_probs=None`` means on-policy: the batch is used for exactly one update, so the old policy *is* the current
    one. The old log-probs are then the detached new ones and r is exactly 1. A second forward pass would not give that:
    a mixture of experts may route a token differently in it.
    """
    on_policy = old_log_probs is None
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    ratio = (log_probs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -ratio * advantages
    if on_policy:
        return PolicyLoss(plain, ratio.detach(), torch.zeros_like(plain, dtype=torch.bool))
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip is not None:
        cap = -dual_clip * advantages
        capped = (advantages < 0) & (cap < loss)
        loss = torch.where(capped, cap, loss)
        clipped = clipped | capped
    return PolicyLoss(loss, ratio.detach(), clipped)
