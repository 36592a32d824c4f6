"""Policy losses on tokens, to be minimised. r = exp(log_probs - old_log_probs).

The papers exponentiate as it is; here the logarithm is clamped to +-20 first, as in verl, so that no ratio overflows. A
token beyond has a ratio of e^20 or e^-20 and no gradient through it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_loop.algorithms.sequences import Sequences

LOG_RATIO_LIMIT = 20.0
"""Nats. e^20 is 4.9e8: far beyond any bound that a ratio is compared with, and its square is finite in fp32."""


@dataclass
class PolicyLoss:
    """All [tokens]; only ``loss`` carries a gradient."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor  # bool: the clipped branch was the active one


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Exponentiate without overflow, from e^-20 to e^20; NaN stays NaN."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def bounded_expm1(log_ratio: Tensor) -> Tensor:
    """``bounded_exp`` minus 1, exact for logarithms near 0."""
    return torch.expm1(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def ppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347, eq. 7; separate bounds as in DAPO,
    arXiv 2503.14476, eq. 10); with ``dual_clip`` = c > 1 it is at most -c A where A < 0 (arXiv 1912.09729, eq. 5).

    ``old_log_probs=None`` means on-policy: the old log-probs are the detached new ones and r is exactly 1. A second
    forward pass would not give that: a mixture of experts may route a token differently in it."""
    ratio = bounded_exp(log_probs - (log_probs.detach() if old_log_probs is None else old_log_probs))
    plain = -ratio * advantages
    if old_log_probs is None:
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


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyLoss:
    """PPO's loss with one ratio per sequence, s = exp(mean of log r) (GSPO, arXiv 2507.18071, eq. 5 and 7).

    ``mask``: the tokens that learn; the mean is over those of the sequence. The mean is clamped, not what it is of.
    Written per token as s_t = sg(s) p_t / sg(p_t) (eq. 14): the gradient is the same where the advantage is that of the
    sequence, and no gradient has to cross context-parallel ranks."""
    if old_log_probs is not None:
        log_ratio = sequences.spread(sequences.mean(log_probs - old_log_probs, mask)).to(log_probs.dtype)
        # exactly the token's own p / sg(p), shifted to the ratio of its sequence
        old_log_probs = log_probs.detach() - log_ratio
    return ppo_loss(log_probs, old_log_probs, advantages, clip_low, clip_high)


def cispo_loss(
    log_probs: Tensor, old_log_probs: Tensor | None, advantages: Tensor, clip_low: float = 1.0, clip_high: float = 0.28
) -> PolicyLoss:
    """L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: no token loses its gradient (CISPO, arXiv 2506.13585,
    eq. 4)."""
    old = log_probs if old_log_probs is None else old_log_probs
    ratio = bounded_exp((log_probs - old).detach())
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-bounded * advantages * log_probs, ratio, bounded != ratio)


def reinforce_loss(log_probs: Tensor, advantages: Tensor) -> PolicyLoss:
    """L = -A log pi (Williams, 1992)."""
    one = torch.ones_like(log_probs)
    return PolicyLoss(-advantages * log_probs, one, torch.zeros_like(one, dtype=torch.bool))


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """The critic's loss [tokens], and where the clipped branch was the active one:
    L = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2, as in OpenAI's PPO."""
    bounded = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    plain, clipped = (values - returns).square(), (bounded - returns).square()
    return torch.maximum(plain, clipped) / 2, clipped > plain


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: str) -> Tensor:
    """[tokens], estimates of KL(pi || pi_reference) on tokens sampled from pi. With d = log pi - log pi_reference:
    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL divergence").

    Only k3 can overflow: below -20, d counts as -20 there (as in verl), and has no gradient. Raises ValueError for
    another name."""
    d = log_probs - reference_log_probs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        d = d.clamp(min=-LOG_RATIO_LIMIT)
        return torch.expm1(-d) + d
    raise ValueError(f"unknown KL estimator {estimator!r}")
