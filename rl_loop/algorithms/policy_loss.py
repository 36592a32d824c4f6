"""Policy losses per token, to be minimized, of the ratio r = exp(log_probs - old_log_probs).

The papers exponentiate the logarithm as it is. Here it is clamped to +-20 first, as in verl, so
that no ratio overflows. A token beyond has a ratio of e^20 or e^-20 and no gradient through it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_gptoss.token_columns import require_column
from rl_loop.algorithms.sequences import Sequences

LOG_RATIO_LIMIT = 20.0
"""Nats. e^20 is 4.9e8, beyond any bound of a ratio, and its square is finite in fp32."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a policy loss: the tokens of one micro-batch, packed.

    Where ``mask`` is False, log-probs and advantages are 0 and carry no gradient. The loss of such
    tokens is dropped.
    """

    log_probs: Tensor
    """[tokens]: log pi of the sampled tokens, with gradient."""
    old_log_probs: Tensor | None
    """[tokens]: denominator of the ratio, constant. None on-policy: the ratio is exactly 1."""
    advantages: Tensor
    """[tokens]: constant."""
    mask: Tensor
    """bool [tokens]: the tokens that learn."""
    sequences: Sequences
    """Sequence of every token, for sums and means over whole sequences."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """All columns of the micro-batch by name (``TokenColumns``), [tokens] each, constant. Not
    masked: a loss reads them with ``column``."""

    def column(self, name: str) -> Tensor:
        """Return a per-token column, with 0 where ``mask`` is False.

        Raises:
            ColumnError: no sequence of the step has the column.
        """
        column = require_column(self.columns, name)
        return torch.where(self.mask, column, torch.zeros_like(column))

    def log_ratio(self) -> Tensor:
        """Compute log(pi / pi_old) [tokens] with a gradient to ``log_probs``.

        On-policy the old log-probs are the detached new ones. A second forward pass would not give
        a ratio of 1: a mixture of experts may route a token differently in it.
        """
        if self.old_log_probs is None:
            return self.log_probs - self.log_probs.detach()
        return self.log_probs - self.old_log_probs

    def ratio(self) -> Tensor:
        """Compute pi / pi_old [tokens] with a gradient to ``log_probs``, from e^-20 to e^20."""
        return bounded_exp(self.log_ratio())


@dataclass
class PolicyLoss:
    """Result of a policy loss: [tokens] each, but for ``sums``."""

    loss: Tensor
    """To be minimised; the only one with a gradient."""
    ratio: Tensor
    """The importance ratio, for metrics."""
    clipped: Tensor
    """bool: True where clipping decided the loss of the token, for metrics."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Metrics of the loss: name -> scalar, a sum over the tokens of the micro-batch in ``mask``.
    The run logs ``policy_loss/NAME``, the sum of all micro-batches and ranks per sampled token. A
    loss has the same names in every micro-batch."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Exponentiate without overflow, from e^-20 to e^20; NaN stays NaN."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def bounded_expm1(log_ratio: Tensor) -> Tensor:
    """Compute ``bounded_exp`` minus 1, exact for logarithms near 0."""
    return torch.expm1(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def ppo_loss(
    inputs: LossInputs,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Clip the ratio of every token: L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A).

    PPO, arXiv 1707.06347, eq. 7; separate bounds as in DAPO, arXiv 2503.14476, eq. 10. With
    ``dual_clip`` = c > 1 the loss is at most -c A where A < 0 (arXiv 1912.09729, eq. 5).
    """
    ratio = inputs.ratio()
    advantages = inputs.advantages
    plain = -ratio * advantages
    if inputs.old_log_probs is None:
        # The ratio is exactly 1, so there is nothing to clip.
        return PolicyLoss(
            loss=plain, ratio=ratio.detach(), clipped=torch.zeros_like(plain, dtype=torch.bool)
        )

    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain

    # For A < 0 the maximum above leaves a growing ratio unbounded: one token could rule an update.
    if dual_clip is not None:
        cap = -dual_clip * advantages
        capped = (advantages < 0) & (cap < loss)
        loss = torch.where(capped, cap, loss)
        clipped = clipped | capped
    return PolicyLoss(loss=loss, ratio=ratio.detach(), clipped=clipped)


def gspo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """Clip one ratio per sequence, s = exp(mean of log r) (GSPO, arXiv 2507.18071, eq. 5 and 7).

    The mean is over the tokens of the sequence that learn, and is clamped itself, not its terms.
    Written per token as s_t = sg(s) p_t / sg(p_t) (eq. 14): the gradient is the same where the
    advantage is that of the sequence, and no gradient has to cross context-parallel ranks.
    """
    if inputs.old_log_probs is not None:
        sequences = inputs.sequences
        mean = sequences.mean(inputs.log_ratio(), inputs.mask)
        log_ratio = sequences.spread(mean).to(inputs.log_probs.dtype)

        # Exactly the token's own p / sg(p), shifted to the ratio of its sequence.
        inputs = replace(inputs, old_log_probs=inputs.log_probs.detach() - log_ratio)
    return ppo_loss(inputs, clip_low=clip_low, clip_high=clip_high)


def cispo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """Take the clipped ratio as a constant weight: no token loses its gradient.

    L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi (CISPO, arXiv 2506.13585, eq. 4).
    """
    ratio = inputs.ratio().detach()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    # The gradient comes from log pi alone, so a clipped token still learns.
    loss = -bounded * inputs.advantages * inputs.log_probs
    return PolicyLoss(loss=loss, ratio=ratio, clipped=bounded != ratio)


def reinforce_loss(inputs: LossInputs) -> PolicyLoss:
    """Weigh log-probs by advantages, without a ratio: L = -A log pi (Williams, 1992)."""
    loss = -inputs.advantages * inputs.log_probs
    ratio = torch.ones_like(inputs.log_probs)
    return PolicyLoss(loss=loss, ratio=ratio, clipped=torch.zeros_like(ratio, dtype=torch.bool))


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Compute the critic's loss [tokens], and where the clipped branch was the active one.

    L = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2, as in OpenAI's PPO.
    """
    bounded = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    # The larger error counts: a value gains nothing by leaving the range around its old estimate.
    plain_error = (values - returns).square()
    bounded_error = (bounded - returns).square()
    return torch.maximum(plain_error, bounded_error) / 2, bounded_error > plain_error


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(pi || pi_reference) [tokens] from tokens that pi sampled.

    With d = log pi - log pi_reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman,
    "Approximating KL divergence"). Only k3 can overflow: below -20, d counts as -20 there (as in
    verl), and has no gradient. Raises ValueError for another name.
    """
    d = log_probs - reference_log_probs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        d = d.clamp(min=-LOG_RATIO_LIMIT)
        return torch.expm1(-d) + d
    raise ValueError(f"unknown KL estimator {estimator!r}")
