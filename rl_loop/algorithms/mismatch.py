"""How far the policy that sampled and the policy that is trained are apart on the sampled tokens."""

from __future__ import annotations

import torch

from rl_loop.algorithms.policy_loss import LOG_RATIO_LIMIT
from rl_loop.algorithms.sequences import Sequences


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
    ``log_ppl_gap`` averages it over sequences when divided by ``sequences``.
    """
    d = torch.where(mask, log_probs.detach() - rollout_log_probs, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = d.exp()
    length = sequences.sum(mask, mask).clamp(min=1)
    gap = (sequences.sum(d, mask) / length).abs()
    # a sequence may be spread over ranks: every token brings its share
    share = torch.where(mask, 1 / sequences.spread(length), 0.0)
    sums = {
        "mismatch/logprob_gap": d.abs().sum(),
        "mismatch/kl_k1": (-d).sum(),
        "mismatch/kl_k2": (d.square() / 2).sum(),
        "mismatch/kl_k3": (torch.expm1(d) - d).sum(),
        "mismatch/prob_ratio": torch.where(mask, d.abs().exp(), 0.0).sum(),
        "mismatch/chi_square": (ratio - 1).square().sum(),
        "mismatch/log_perplexity_train": torch.where(mask, -log_probs.detach(), 0.0).sum(),
        "mismatch/log_perplexity_rollout": torch.where(mask, -rollout_log_probs, 0.0).sum(),
        "mismatch/log_ppl_gap": (share * sequences.spread(gap)).sum(),
        "sequences": share.sum(),
    }
    return sums, {"mismatch/logprob_gap_max": d.abs().max(), "mismatch/log_ppl_gap_max": gap.max()}
