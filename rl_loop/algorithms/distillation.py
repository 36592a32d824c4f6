"""Distance of the policy from a teacher's distribution at every token."""

import torch

MIN_REST = 1e-4
"""Probability of all tokens outside of the top k that counts. A smaller one is mostly rounding
error, because it is 1 minus a sum in fp32."""


def forward_kl(log_probs: torch.Tensor, teacher_log_probs: torch.Tensor) -> torch.Tensor:
    """Return KL(teacher || policy) of every token, in nats.

    Both distributions are over k + 1 events: the k tokens, and all other tokens together. With
    r = 1 - sum p as the probability of all others:

        KL = sum_k p_teacher (log p_teacher - log p) + r_teacher (log r_teacher - log r)

    This is a lower bound of the divergence over the vocabulary. Both are equal for k = vocabulary.

    Args:
        log_probs: [tokens, k] of the policy, differentiable.
        teacher_log_probs: [tokens, k] of the same tokens.

    Returns:
        [tokens].

    Example:
        >>> # The teacher's two most likely tokens of one position.
        >>> teacher = torch.tensor([[0.7, 0.2]]).log()
        >>> forward_kl(teacher, teacher).abs().max().item() < 1e-6
        True
        >>> forward_kl(torch.tensor([[0.2, 0.7]]).log(), teacher)
        tensor([0.6264])
    """
    teacher = teacher_log_probs.exp()
    inside = (teacher * (teacher_log_probs - log_probs)).sum(-1)

    teacher_rest = 1 - teacher.sum(-1)
    counts = teacher_rest > MIN_REST
    # Where the rest does not count, 1 replaces it, so that no gradient is NaN.
    teacher_rest = torch.where(counts, teacher_rest, 1.0)
    # A rounded difference, which may be 0 or negative. The clamp keeps its logarithm finite.
    rest = torch.where(counts, 1 - log_probs.exp().sum(-1), 1.0).clamp_min(1e-2 * MIN_REST)
    return inside + teacher_rest * (teacher_rest.log() - rest.log())
