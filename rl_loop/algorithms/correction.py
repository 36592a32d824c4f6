"""Rollout correction: weights and rejections for tokens that the engine sampled from a slightly different policy.

rho_t = pi_trainer(token t) / pi_rollout(token t), in this module and everywhere else; its logarithm is clamped to +-20.
Everything here is constant to autograd.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_loop.algorithms.config import CorrectionConfig
from rl_loop.algorithms.policy_loss import LOG_RATIO_LIMIT, bounded_exp
from rl_loop.algorithms.sequences import Sequences


@dataclass
class Correction:
    """``weights`` [tokens]: factor of the policy loss, 0 where something was dropped. ``dropped``: reason -> bool
    [tokens]."""

    weights: torch.Tensor
    dropped: dict[str, torch.Tensor]


def within(ratio: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    return (ratio >= bounds[0]) & (ratio <= bounds[1])


def rollout_correction(
    config: CorrectionConfig,
    log_rho: torch.Tensor,
    mask: torch.Tensor,
    sequences: Sequences,
    advantages: torch.Tensor,
    log_old_over_new: torch.Tensor | None = None,
) -> Correction:
    """log_rho, advantages, log_old_over_new (log pi_old - log pi): [tokens]; mask: bool [tokens].

    - ``token_tis``: min(rho_t, C) (truncated importance sampling).
    - ``sequence_tis``: min(prod_t rho_t, C).
    - ``sequence_mis``: sequence_tis if lo <= prod_t rho_t <= hi, else 0 (masked importance sampling).
    - ``icepop``: rho_t if lo <= rho_t <= hi, else 0 (IcePop).
    - geometric rejection: keeps a sequence if lo <= exp(mean_t log rho_t) <= hi.
    - k3 rejection: keeps a sequence if mean_t(rho_t - 1 - log rho_t) <= c.
    - veto: drops a sequence with any rho_t < threshold.
    - OPSM: drops a sequence if A < 0 and mean_t log(pi_old / pi) > d.
    """
    log_rho = log_rho.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rho = log_rho.exp()
    dropped: dict[str, torch.Tensor] = {}

    def product() -> torch.Tensor:
        return sequences.spread(bounded_exp(sequences.sum(log_rho, mask))).to(rho.dtype)

    if config.weight == "none":
        weights = torch.ones_like(rho)
    elif config.weight == "token_tis":
        weights = rho.clamp(max=config.cap)
    elif config.weight == "icepop":
        weights = rho
        dropped["icepop"] = ~within(rho, config.bounds or (0.5, 5.0))
    else:
        weights = product().clamp(max=config.cap)
        if config.weight == "sequence_mis":
            dropped["sequence_mis"] = ~within(product(), config.bounds or (0.5, 2.0))
    if config.geometric_bounds:
        geometric = sequences.mean(log_rho, mask).exp()
        dropped["geometric"] = sequences.spread(~within(geometric, config.geometric_bounds))
    if config.k3_limit:
        k3 = sequences.mean(torch.expm1(log_rho) - log_rho, mask)
        dropped["k3"] = sequences.spread(k3 > config.k3_limit)
    if config.veto:
        dropped["veto"] = sequences.spread(sequences.sum(rho < config.veto, mask) > 0)
    if config.off_policy_limit and log_old_over_new is not None:
        drift = sequences.spread(sequences.mean(log_old_over_new, mask))
        dropped["off_policy"] = (advantages < 0) & (drift > config.off_policy_limit)
    for tokens in dropped.values():
        weights = torch.where(tokens, 0.0, weights)
    return Correction(weights, dropped)
