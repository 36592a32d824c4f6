"""Distance of the policy from a teacher's distribution at every token.

Distributions are over k + 1 events: the teacher's k most likely tokens, and all other tokens
together. A divergence over events is a lower bound of the divergence over the vocabulary. Both are
equal for k = vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from rl_loop.algorithms.choices import DivergenceLoss, JsdDistillation, ReverseKlDistillation

MIN_OTHER_PROBABILITY = 1e-4
"""Probability of all tokens outside of the top k that counts. A smaller one is mostly rounding
error, because it is 1 minus a sum in fp32."""

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probs of the policy [tokens, k], log-probs of the teacher) -> divergence [tokens]."""


@dataclass(frozen=True)
class TopKDistribution:
    """Distribution over k tokens, and all other tokens as one event."""

    log_probs: torch.Tensor
    """[tokens, k]: log-probs of the k tokens, in nats."""
    other_probability: torch.Tensor
    """[tokens]: probability of all other tokens. A rounded difference, which may be 0 or
    negative."""

    @classmethod
    def of(cls, log_probs: torch.Tensor) -> Self:
        """Return the distribution with the log-probs [tokens, k]."""
        return cls(log_probs, 1 - log_probs.exp().sum(-1))

    def mixture(self, other: "TopKDistribution", share: float) -> "TopKDistribution":
        """Return share x self + (1 - share) x other."""
        log_probs = torch.logaddexp(
            self.log_probs + math.log(share), other.log_probs + math.log(1 - share)
        )
        return TopKDistribution(
            log_probs, share * self.other_probability + (1 - share) * other.other_probability
        )

    def kl(self, other: "TopKDistribution") -> torch.Tensor:
        """Return KL(self || other) in nats, [tokens].

        With a and b as the two distributions, and r_a and r_b as their ``other_probability``:

            KL = sum_k a (log a - log b) + r_a (log r_a - log r_b)
        """
        top_k_sum = (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)
        counts = self.other_probability > MIN_OTHER_PROBABILITY
        # 1 replaces a probability that does not count, so that no gradient is NaN.
        r_a = torch.where(counts, self.other_probability, 1.0)
        # The clamp keeps the logarithm of a rounded difference finite.
        r_b = torch.where(counts, other.other_probability, 1.0)
        r_b = r_b.clamp_min(1e-2 * MIN_OTHER_PROBABILITY)
        return top_k_sum + r_a * (r_a.log() - r_b.log())


def forward_kl(log_probs: torch.Tensor, teacher_log_probs: torch.Tensor) -> torch.Tensor:
    """Return KL(teacher || policy) of every token, in nats (arXiv 1503.02531).

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
    return TopKDistribution.of(teacher_log_probs).kl(TopKDistribution.of(log_probs))


def reverse_kl(log_probs: torch.Tensor, teacher_log_probs: torch.Tensor) -> torch.Tensor:
    """Return KL(policy || teacher) of every token, in nats (arXiv 2306.13649).

    Arguments and result are those of ``forward_kl``.
    """
    return TopKDistribution.of(log_probs).kl(TopKDistribution.of(teacher_log_probs))


def jensen_shannon(
    log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return the generalized Jensen-Shannon divergence of every token (arXiv 2306.13649).

    With the teacher p, the policy q and m = beta p + (1 - beta) q:

        JSD = beta KL(p || m) + (1 - beta) KL(q || m)

    Args:
        log_probs: [tokens, k] of the policy, differentiable.
        teacher_log_probs: [tokens, k] of the same tokens.
        beta: share of the teacher in the mixture, between 0 and 1.

    Returns:
        [tokens], in nats.
    """
    policy, teacher = TopKDistribution.of(log_probs), TopKDistribution.of(teacher_log_probs)
    mixture = teacher.mixture(policy, beta)
    return beta * teacher.kl(mixture) + (1 - beta) * policy.kl(mixture)


def teacher_divergence(
    loss: DivergenceLoss,
    log_probs: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    mask: torch.Tensor,
    comparable: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the divergence of ``algorithm.distillation.loss``, and the sums of its metrics.

    Args:
        loss: the choice.
        log_probs: [tokens, k] of the policy, differentiable.
        teacher_log_probs: [tokens, k] of the same tokens.
        mask: bool [tokens]: tokens that learn from the teacher.
        comparable: bool [tokens]: tokens in the metrics, which include tokens that a correction
            leaves out. All have numbers of a teacher.

    Returns:
        [tokens] in nats, 0 outside ``mask``. And the sums over ``comparable`` of KL(policy || teacher),
        for any choice, of the probability of the teacher's k tokens, and of 1.
    """
    distance = masked_divergence(_function(loss), log_probs, teacher_log_probs, mask)
    kl = masked_divergence(reverse_kl, log_probs.detach(), teacher_log_probs, comparable)
    mass = torch.where(comparable, teacher_log_probs.exp().sum(-1), 0.0)
    return distance, {
        "distillation/teacher_kl": kl.sum(),
        "distillation/teacher_mass": mass.sum(),
        "teacher_tokens": comparable.sum(),
    }


def masked_divergence(
    divergence: Divergence,
    log_probs: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Return a divergence [tokens] in nats, with 0 and no gradient outside ``mask``.

    Args:
        divergence: the function.
        log_probs: [tokens, k] of the policy, differentiable.
        teacher_log_probs: [tokens, k] of the same tokens.
        mask: bool [tokens].
    """
    # A mask of the result alone would not keep a NaN of another token out of the gradient.
    policy = torch.where(mask[:, None], log_probs, 0.0)
    teacher = torch.where(mask[:, None], teacher_log_probs, 0.0)
    return torch.where(mask, divergence(policy, teacher), 0.0)


def _function(loss: DivergenceLoss) -> Divergence:
    if isinstance(loss, JsdDistillation):
        return partial(jensen_shannon, beta=loss.beta)
    return reverse_kl if isinstance(loss, ReverseKlDistillation) else forward_kl
