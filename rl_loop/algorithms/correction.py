"""How far the policy that sampled and the policy that is trained are apart, and what rollout correction does about it.

rho_t = pi_trainer(token t) / pi_rollout(token t), in this module and everywhere else. Exponentials are taken of
logarithms clamped to +-20; sums, means and comparisons see the logarithms as they are. Everything here is constant to
autograd."""

import math
from dataclasses import dataclass

import torch

from rl_loop.algorithms.config import CorrectionConfig
from rl_loop.algorithms.policy_loss import bounded_exp, bounded_expm1
from rl_loop.algorithms.sequences import Sequences


@dataclass
class Correction:
    """What ``rollout_correction`` does to each token."""

    weights: torch.Tensor  # [tokens]: factor of the policy loss, 0 where something was dropped
    dropped: dict[str, torch.Tensor]  # reason -> bool [tokens]

    @property
    def keeps(self) -> torch.Tensor:
        """bool [tokens]: nothing dropped the token."""
        keeps = torch.ones_like(self.weights, dtype=torch.bool)
        for tokens in self.dropped.values():
            keeps = keeps & ~tokens
        return keeps


def within(ratio: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    """Say where a ratio lies within bounds; nowhere if it is NaN."""
    return (ratio >= bounds[0]) & (ratio <= bounds[1])


def rollout_correction(
    config: CorrectionConfig,
    log_rho: torch.Tensor,
    mask: torch.Tensor,
    sequences: Sequences,
    advantages: torch.Tensor,
    log_old_over_new: torch.Tensor | None = None,
    moved_mask: torch.Tensor | None = None,
) -> Correction:
    """Weigh tokens by rho, or drop them. log_rho, advantages, log_old_over_new (log pi_old - log pi): [tokens].

    ``mask``, bool [tokens]: where log_rho means something, that is where the engine sampled the token in the context
    that it is trained in. Grafted and stale tokens are not in it: they get what their sequence gets, and add nothing to
    its sums and means, neither a value nor a count. A sequence with no token in the mask is kept, with weight 1.
    ``moved_mask``: the same for log_old_over_new, by default ``mask``; grafted tokens are in it.

    - ``token_tis``: min(rho_t, C) (truncated importance sampling).
    - ``sequence_tis``: min(prod_t rho_t, C).
    - ``sequence_mis``: sequence_tis if lo <= prod_t rho_t <= hi, else 0 (masked importance sampling).
    - ``icepop``: rho_t if lo <= rho_t <= hi, else 0 (IcePop).
    - geometric rejection: keeps a sequence if lo <= exp(mean_t log rho_t) <= hi.
    - k3 rejection: keeps a sequence if mean_t(rho_t - 1 - log rho_t) <= c.
    - veto: drops a sequence with any rho_t < threshold.
    - OPSM: drops a sequence if A < 0 and mean_t log(pi_old / pi) > d."""
    log_rho = torch.where(mask, log_rho.detach(), 0.0)
    rho = bounded_exp(log_rho)

    dropped: dict[str, torch.Tensor] = {}
    if config.weight == "none":
        weights = torch.ones_like(rho)
    elif config.weight == "token_tis":
        weights = rho.clamp(max=config.cap)
    elif config.weight == "icepop":
        weights = rho
        dropped["icepop"] = ~within(rho, config.bounds or (0.5, 5.0))
    else:
        product = sequences.spread(bounded_exp(sequences.sum(log_rho, mask))).to(rho.dtype)
        weights = product.clamp(max=config.cap)
        if config.weight == "sequence_mis":
            dropped["sequence_mis"] = ~within(product, config.bounds or (0.5, 2.0))

    # "not (x <= limit)": a NaN in a sequence drops it
    if config.geometric_bounds:
        geometric = bounded_exp(sequences.mean(log_rho, mask))
        dropped["geometric"] = sequences.spread(~within(geometric, config.geometric_bounds))
    if config.k3_limit:
        k3 = sequences.mean(bounded_expm1(log_rho) - log_rho, mask)
        dropped["k3"] = sequences.spread(~(k3 <= config.k3_limit))
    if config.veto:
        vetoed = ~(log_rho >= math.log(config.veto))
        dropped["veto"] = sequences.spread(sequences.sum(vetoed, mask) > 0)
    if config.off_policy_limit and log_old_over_new is not None:
        drift = sequences.mean(log_old_over_new, mask if moved_mask is None else moved_mask)
        dropped["off_policy"] = (advantages < 0) & sequences.spread(~(drift <= config.off_policy_limit))

    for tokens in dropped.values():
        weights = torch.where(tokens, 0.0, weights)
    return Correction(weights, dropped)


def mismatch_sums(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor, sequences: Sequences
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Sums over masked tokens (divide by their number) and maxima, by the names of metrics. Inputs [tokens], the mask
    bool; natural logs.

    With d = log pi_train - log pi_rollout and tokens drawn from pi_rollout (Schulman, "Approximating KL divergence"):
    k1 = -d, k2 = d^2 / 2 and k3 = exp(d) - 1 - d each average to an estimate of KL(pi_rollout || pi_train).
    ``prob_ratio`` averages exp(|d|) (others call it token_mult_prob_error); 1 is no mismatch. ``chi_square`` averages
    (exp(d) - 1)^2, the variance of the importance weight. ``log_perplexity`` sums give both perplexities: exp of their
    averages. ``log_ppl_gap_max`` is the largest |mean of d| of a sequence, the difference of its two log-perplexities;
    ``log_ppl_gap`` averages it over sequences when divided by ``sequences``."""
    d = torch.where(mask, log_probs.detach() - rollout_log_probs, 0.0)
    excess = bounded_expm1(d)  # of the ratio over 1
    length = sequences.sum(mask, mask).clamp(min=1)
    gap = (sequences.sum(d, mask) / length).abs()
    # a sequence may be spread over ranks: every token brings its share
    share = torch.where(mask, 1 / sequences.spread(length), 0.0)
    sums = {
        "mismatch/logprob_gap": d.abs().sum(),
        "mismatch/kl_k1": (-d).sum(),
        "mismatch/kl_k2": (d.square() / 2).sum(),
        "mismatch/kl_k3": (excess - d).sum(),
        "mismatch/prob_ratio": torch.where(mask, bounded_exp(d.abs()), 0.0).sum(),
        "mismatch/chi_square": excess.square().sum(),
        "mismatch/log_perplexity_train": torch.where(mask, -log_probs.detach(), 0.0).sum(),
        "mismatch/log_perplexity_rollout": torch.where(mask, -rollout_log_probs, 0.0).sum(),
        "mismatch/log_ppl_gap": (share * sequences.spread(gap)).sum(),
        "sequences": share.sum(),
    }
    return sums, {"mismatch/logprob_gap_max": d.abs().max(), "mismatch/log_ppl_gap_max": gap.max()}
