"""Mismatch between the policy of the engine and the policy of the trainer, and its correction.

rho_t = pi_trainer(token t) / pi_rollout(token t), here and in all other modules. Logarithms are
clamped to +-20 before they are exponentiated. Sums, means and comparisons use the unclamped
logarithms. No result has a gradient.
"""

import math
from dataclasses import dataclass

import torch

from rl_loop.algorithms.config import CorrectionConfig
from rl_loop.algorithms.policy_loss import bounded_exp, bounded_expm1
from rl_loop.algorithms.sequences import SequenceIndex


@dataclass
class Correction:
    """Result of ``rollout_correction`` for each token."""

    weights: torch.Tensor
    """[tokens]: factor of the policy loss, 0 for dropped tokens."""
    dropped: dict[str, torch.Tensor]
    """bool [tokens] by reason, such as "veto": True for tokens that are dropped for this reason."""

    @property
    def keeps(self) -> torch.Tensor:
        """bool [tokens]: True for tokens that are not dropped."""
        keeps = torch.ones_like(self.weights, dtype=torch.bool)
        for tokens in self.dropped.values():
            keeps = keeps & ~tokens
        return keeps


def within(ratio: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    """Return bool [...]: True where a ratio [...] is within its inclusive bounds, False for NaN."""
    return (ratio >= bounds[0]) & (ratio <= bounds[1])


def rollout_correction(
    config: CorrectionConfig,
    log_rho: torch.Tensor,
    mask: torch.Tensor,
    sequences: SequenceIndex,
    advantages: torch.Tensor,
    log_old_over_new: torch.Tensor | None = None,
    moved_mask: torch.Tensor | None = None,
) -> Correction:
    """Weight tokens by rho, or drop them.

    - ``token_tis``: min(rho_t, C) (truncated importance sampling).
    - ``sequence_tis``: min(prod_t rho_t, C).
    - ``sequence_mis``: sequence_tis if lo <= prod_t rho_t <= hi, else 0 (masked importance
      sampling).
    - ``icepop``: rho_t if lo <= rho_t <= hi, else 0 (IcePop).
    - geometric rejection: keeps a sequence if lo <= exp(mean_t log rho_t) <= hi.
    - k3 rejection: keeps a sequence if mean_t(rho_t - 1 - log rho_t) <= c.
    - veto: drops a sequence with any rho_t < threshold.
    - OPSM: drops a sequence if A < 0 and mean_t log(pi_old / pi) > d.

    Decisions about a whole sequence apply to all its tokens, but only tokens in ``mask`` enter its
    sums and means. A sequence without a token in the mask is kept, with weight 1.

    Args:
        config: corrections to apply.
        log_rho: [tokens].
        mask: bool [tokens], True where log_rho is meaningful: the engine sampled the token in the
            context in which it is trained. False for spliced tokens and tokens older than
            ``max_staleness``.
        sequences: sequence of each token.
        advantages: [tokens].
        log_old_over_new: [tokens], log pi_old - log pi.
        moved_mask: bool [tokens], mask for ``log_old_over_new``. Unlike ``mask``, it includes
            spliced tokens. Default: ``mask``.
    """
    # Set rho to 1 where it is meaningless, so that weights of single tokens are 1 there.
    log_rho = torch.where(mask, log_rho.detach(), 0.0)
    correction = _weigh(config, log_rho, mask, sequences)
    dropped = correction.dropped
    dropped.update(_find_rejected(config, log_rho, mask, sequences))

    if config.off_policy_limit and log_old_over_new is not None:
        # Spliced tokens count here, because both sides are the trainer's.
        drift = sequences.mean(log_old_over_new, mask if moved_mask is None else moved_mask)
        # With "drift > limit", a NaN would keep its sequence.
        drifted = sequences.to_tokens(~(drift <= config.off_policy_limit))
        dropped["off_policy"] = (advantages < 0) & drifted

    # Set the weights of dropped tokens to 0, because metrics average the weights.
    for tokens in dropped.values():
        correction.weights = torch.where(tokens, 0.0, correction.weights)
    return correction


def _find_rejected(
    config: CorrectionConfig, log_rho: torch.Tensor, mask: torch.Tensor, sequences: SequenceIndex
) -> dict[str, torch.Tensor]:
    """Return the tokens that the configured tests of rho drop: bool [tokens] by reason."""
    dropped: dict[str, torch.Tensor] = {}

    # The tests below are "not (x <= limit)", so that a NaN drops its sequence.
    if config.geometric_bounds:
        geometric_mean = bounded_exp(sequences.mean(log_rho, mask))
        dropped["geometric"] = sequences.to_tokens(~within(geometric_mean, config.geometric_bounds))

    if config.k3_limit:
        k3 = sequences.mean(bounded_expm1(log_rho) - log_rho, mask)
        dropped["k3"] = sequences.to_tokens(~(k3 <= config.k3_limit))

    if config.veto:
        # Compared as logarithms, because bounded exponentials end at e^-20.
        vetoed = ~(log_rho >= math.log(config.veto))
        dropped["veto"] = sequences.to_tokens(sequences.sum(vetoed, mask) > 0)
    return dropped


def _weigh(
    config: CorrectionConfig, log_rho: torch.Tensor, mask: torch.Tensor, sequences: SequenceIndex
) -> Correction:
    """Return the weights of ``config.weight``, and the tokens that its bounds drop."""
    rho = bounded_exp(log_rho)
    if config.weight == "none":
        return Correction(weights=torch.ones_like(rho), dropped={})
    if config.weight == "token_tis":
        # Truncation bounds the variance of the weights at the price of a bias.
        return Correction(weights=rho.clamp(max=config.cap), dropped={})
    if config.weight == "icepop":
        outside = ~within(rho, config.bounds or (0.5, 5.0))
        return Correction(weights=rho, dropped={"icepop": outside})

    # Clamp the sum of logarithms, because a product of thousands of ratios overflows.
    product = sequences.to_tokens(bounded_exp(sequences.sum(log_rho, mask))).to(rho.dtype)
    correction = Correction(weights=product.clamp(max=config.cap), dropped={})
    if config.weight == "sequence_mis":
        correction.dropped["sequence_mis"] = ~within(product, config.bounds or (0.5, 2.0))
    return correction


def mismatch_sums(
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    sequences: SequenceIndex,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return sums and maxima over the tokens in ``mask``, by metric.

    The caller divides the sums by the number of these tokens, after adding those of all ranks.

    With d = log pi_train - log pi_rollout and tokens drawn from pi_rollout (Schulman,
    "Approximating KL divergence"), the averages of k1 = -d, k2 = d^2 / 2 and k3 = exp(d) - 1 - d
    estimate KL(pi_rollout || pi_train).

    - ``prob_ratio`` averages exp(|d|), also known as token_mult_prob_error. 1 is no mismatch.
    - ``chi_square`` averages (exp(d) - 1)^2, the variance of the importance weight.
    - ``log_perplexity_trainer`` and ``log_perplexity_rollout``: exp of the average is the
      perplexity.
    - ``log_perplexity_gap_max`` is the largest |mean of d| of a sequence, the difference of its two
      log-perplexities. ``log_perplexity_gap_mean``, divided by ``sequences``, is the average of
      these differences over sequences.

    Args:
        log_probs: [tokens], the trainer's natural logs.
        rollout_log_probs: [tokens], the engine's natural logs.
        mask: bool [tokens], tokens to compare.
        sequences: sequence of each token.
    """
    d = torch.where(mask, log_probs.detach() - rollout_log_probs, 0.0)
    ratio_minus_one = bounded_expm1(d)

    # Average within sequences first, so that one long sequence that drifted shows in the maximum.
    length = sequences.sum(mask, mask).clamp(min=1)
    gap = (sequences.sum(d, mask) / length).abs()
    # A sequence may be distributed over ranks, so every token contributes its share.
    share = torch.where(mask, 1 / sequences.to_tokens(length), 0.0)

    sums = {
        "mismatch/log_prob_gap_mean": d.abs().sum(),
        "mismatch/kl_k1": (-d).sum(),
        "mismatch/kl_k2": (d.square() / 2).sum(),
        "mismatch/kl_k3": (ratio_minus_one - d).sum(),
        # exp(0) is 1, so tokens outside the mask are left out once more.
        "mismatch/prob_ratio": torch.where(mask, bounded_exp(d.abs()), 0.0).sum(),
        "mismatch/chi_square": ratio_minus_one.square().sum(),
        "mismatch/log_perplexity_trainer": torch.where(mask, -log_probs.detach(), 0.0).sum(),
        "mismatch/log_perplexity_rollout": torch.where(mask, -rollout_log_probs, 0.0).sum(),
        "mismatch/log_perplexity_gap_mean": (share * sequences.to_tokens(gap)).sum(),
        "sequences": share.sum(),
    }
    maxima = {
        "mismatch/log_prob_gap_max": d.abs().max(),
        "mismatch/log_perplexity_gap_max": gap.max(),
    }
    return sums, maxima
