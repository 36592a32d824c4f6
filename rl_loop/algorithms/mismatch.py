"""How far the policy that sampled and the policy that is trained are apart on the sampled tokens."""

from __future__ import annotations

import torch


def mismatch_sums(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Sums over masked tokens (divide by their number) and maxima. All inputs [tokens]; natural logs.

    With d = log pi_train - log pi_rollout and tokens drawn from pi_rollout (Schulman, "Approximating KL divergence"):
    k1 = -d, k2 = d^2 / 2 and k3 = exp(d) - 1 - d each average to an estimate of KL(pi_rollout || pi_train).
    ``prob_ratio`` averages exp(|d|); 1 is no mismatch. ``chi_square`` averages (exp(d) - 1)^2, the variance of the
    importance weight. ``log_perplexity`` sums give both perplexities: exp of their averages.
    """
    on = mask > 0
    d = torch.where(on, log_probs.detach() - rollout_log_probs, 0.0).clamp(-20, 20)
    ratio = d.exp()
    sums = {
        "logprob_gap": d.abs().sum(),
        "kl_k1": (-d).sum(),
        "kl_k2": (d.square() / 2).sum(),
        "kl_k3": (ratio - 1 - d).sum(),
        "prob_ratio": torch.where(on, d.abs().exp(), 0.0).sum(),
        "chi_square": (ratio - 1).square().sum(),
        "log_perplexity_train": torch.where(on, -log_probs.detach(), 0.0).sum(),
        "log_perplexity_rollout": torch.where(on, -rollout_log_probs, 0.0).sum(),
    }
    return sums, {"logprob_gap_max": d.abs().max()}
