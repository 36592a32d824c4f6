"""Policy losses per token, to be minimized, of the ratio r = exp(log_probs - old_log_probs).

The papers use the unclamped logarithm. Here it is clamped to +-20 first, as in verl, so no ratio
overflows. A token beyond the limit has a ratio of e^20 or e^-20 and no gradient through it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_gptoss.token_columns import require_column
from rl_loop.algorithms.sequences import SequenceIndex

LOG_RATIO_LIMIT = 20.0
"""Limit in nats. e^20 is 4.9e8, beyond any bound of a ratio, and its square is finite in fp32."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a policy loss: the tokens of one micro-batch, packed.

    Tokens outside ``mask`` have log-probs and advantages of 0 without a gradient, and their loss is
    dropped.
    """

    log_probs: Tensor
    """[tokens]: log pi of the sampled tokens, with gradient."""
    old_log_probs: Tensor | None
    """[tokens]: denominator of the ratio, constant. None on-policy: the ratio is exactly 1."""
    advantages: Tensor
    """[tokens]: constant."""
    mask: Tensor
    """bool [tokens]: tokens that are trained on."""
    sequences: SequenceIndex
    """Sequence of every token, for sums and means over whole sequences."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """All columns of the micro-batch by name (``TokenColumns``), [tokens] each, constant. Not
    masked: a loss reads them with ``column``."""

    def column(self, name: str) -> Tensor:
        """Return a column [tokens] in its dtype, with 0 where ``mask`` is False.

        Raises:
            ColumnError: no sequence of the step has the column.
        """
        column = require_column(self.columns, name)
        return torch.where(self.mask, column, torch.zeros_like(column))

    def log_ratio(self) -> Tensor:
        """Compute log(pi / pi_old) [tokens], in the dtype of ``log_probs``, with a gradient to it.

        On-policy, the old log-probs are the detached new ones. With a second forward pass the ratio
        would differ from 1, because a mixture of experts may route a token differently in it.
        """
        if self.old_log_probs is None:
            return self.log_probs - self.log_probs.detach()
        return self.log_probs - self.old_log_probs

    def ratio(self) -> Tensor:
        """Compute pi / pi_old [tokens], e^-20 to e^20, in the dtype of ``log_probs``.

        It has a gradient to ``log_probs``.
        """
        return bounded_exp(self.log_ratio())


@dataclass
class PolicyLoss:
    """Result of a policy loss: [tokens] each, except for ``sums``."""

    loss: Tensor
    """Loss to be minimized. Only this field has a gradient."""
    ratio: Tensor
    """Importance ratio, for metrics."""
    clipped: Tensor
    """bool: True if the clipped branch determined the loss of the token, for metrics."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Metrics of the loss: name -> scalar, a sum over the tokens of the micro-batch in ``mask``.
    The run logs ``policy_loss/NAME``, the sum of all micro-batches and ranks per sampled token. A
    loss has the same names in every micro-batch."""


def zero_outside(mask: Tensor, values: Tensor) -> Tensor:
    """Return ``values`` [tokens], with 0 and no gradient outside ``mask``."""
    # Selected, not multiplied, because 0 times an infinite log-prob is NaN.
    return torch.where(mask, values, 0.0)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Exponentiate a float [...] without overflow, to e^-20 at least and e^20 at most.

    NaN remains NaN.

    Example:
        >>> [f"{ratio:.2e}" for ratio in bounded_exp(torch.tensor([0.0, 1000.0]))]
        ['1.00e+00', '4.85e+08']
    """
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def bounded_expm1(log_ratio: Tensor) -> Tensor:
    """Compute ``bounded_exp`` minus 1 of a float [...], exact for logarithms near 0."""
    return torch.expm1(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def ppo_loss(
    inputs: LossInputs,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Clip the ratio of every token: L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A).

    PPO (arXiv 1707.06347, eq. 7), with separate bounds as in DAPO (arXiv 2503.14476, eq. 10).

    Args:
        inputs: tokens of a micro-batch.
        clip_low: lower bound of the ratio is 1 - clip_low.
        clip_high: upper bound of the ratio is 1 + clip_high.
        dual_clip: c > 1 limits the loss of tokens with A < 0 to -c A (arXiv 1912.09729, eq. 5).

    Example:
        >>> # The ratio of the first token is e^0.5 = 1.65, which is clipped to 1.28.
        >>> inputs = LossInputs(
        ...     log_probs=torch.tensor([-1.0, -1.0]),
        ...     old_log_probs=torch.tensor([-1.5, -1.0]),
        ...     advantages=torch.tensor([1.0, -1.0]),
        ...     mask=torch.tensor([True, True]),
        ...     sequences=SequenceIndex(torch.tensor([0, 0]), count=1),
        ... )
        >>> result = ppo_loss(inputs, clip_low=0.2, clip_high=0.28)
        >>> [round(loss, 2) for loss in result.loss.tolist()], result.clipped.tolist()
        ([-1.28, 1.0], [True, False])
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
    # Strictly greater, so that equal losses within the bounds do not count as clipped.
    clipped = bounded > plain

    # For A < 0 the maximum above does not bound a growing ratio, so one token could dominate an
    # update.
    if dual_clip is not None:
        cap = -dual_clip * advantages
        capped = (advantages < 0) & (cap < loss)
        loss = torch.where(capped, cap, loss)
        clipped = clipped | capped
    return PolicyLoss(loss=loss, ratio=ratio.detach(), clipped=clipped)


def gspo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """Clip one ratio per sequence, s = exp(mean of log r) (GSPO, arXiv 2507.18071, eq. 5 and 7).

    The mean is over the tokens of the sequence in the mask. The mean is clamped, not its terms. The
    loss is written per token as s_t = sg(s) p_t / sg(p_t) (eq. 14). Its gradient is equal if all
    tokens have the sequence's advantage, and no gradient crosses context-parallel ranks.

    Args:
        inputs: tokens of a micro-batch.
        clip_low: lower bound of the sequence's ratio is 1 - clip_low.
        clip_high: upper bound of the sequence's ratio is 1 + clip_high.
    """
    if inputs.old_log_probs is not None:
        sequences = inputs.sequences
        # The mean is constant to autograd, so the gradient flows through the token's own p.
        mean = sequences.mean(inputs.log_ratio(), inputs.mask)
        log_ratio = sequences.to_tokens(mean).to(inputs.log_probs.dtype)

        # The token's p / sg(p), shifted exactly to the ratio of its sequence.
        inputs = replace(inputs, old_log_probs=inputs.log_probs.detach() - log_ratio)
    return ppo_loss(inputs, clip_low=clip_low, clip_high=clip_high)


def cispo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """Use the clipped ratio as a constant weight, so that no token loses its gradient.

    L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi (CISPO, arXiv 2506.13585, eq. 4).

    Args:
        inputs: tokens of a micro-batch.
        clip_low: lower bound of the weight is 1 - clip_low.
        clip_high: upper bound of the weight is 1 + clip_high.
    """
    ratio = inputs.ratio().detach()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    # The gradient comes only from log pi, so a clipped token is still trained on.
    loss = -bounded * inputs.advantages * inputs.log_probs
    return PolicyLoss(loss=loss, ratio=ratio, clipped=bounded != ratio)


def reinforce_loss(inputs: LossInputs) -> PolicyLoss:
    """Weight log-probs by advantages, without a ratio: L = -A log pi (Williams, 1992)."""
    loss = -inputs.advantages * inputs.log_probs
    # For the metrics, which every loss has.
    ratio = torch.ones_like(inputs.log_probs)
    return PolicyLoss(loss=loss, ratio=ratio, clipped=torch.zeros_like(ratio, dtype=torch.bool))


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Return the critic's loss, and True where the clipped branch determined it: [tokens] each.

    L = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2, as in OpenAI's PPO.

    Args:
        values: [tokens], V, of any float dtype, which all inputs have.
        old_values: [tokens], V_old, the values before the update.
        returns: [tokens], R.
        clip: c.

    Example:
        >>> # The second value moved by 0.8, but the clip counts only 0.5 of it.
        >>> values, old_values = torch.tensor([0.0, 0.8]), torch.zeros(2)
        >>> loss, clipped = value_loss(values, old_values, torch.ones(2), clip=0.5)
        >>> loss.tolist(), clipped.tolist()
        ([0.5, 0.125], [False, True])
    """
    bounded = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    # The larger error counts, so leaving the range around the old estimate gives a value no
    # advantage.
    plain_error = (values - returns).square()
    bounded_error = (bounded - returns).square()
    return torch.maximum(plain_error, bounded_error) / 2, bounded_error > plain_error


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(pi || pi_reference) [tokens] from tokens that pi sampled.

    With d = log pi - log pi_reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman,
    "Approximating KL divergence"). Only k3 can overflow. There d is at least -20, as in verl, and
    has no gradient below.

    Args:
        log_probs: [tokens], log pi, of any float dtype.
        reference_log_probs: [tokens], log pi_reference.
        estimator: k1, k2 or k3.

    Raises:
        ValueError: the estimator is unknown.

    Example:
        >>> log_probs, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0])
        >>> kl_estimate(log_probs, reference, "k2").tolist()
        [0.0, 0.5]
    """
    d = log_probs - reference_log_probs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        d = d.clamp(min=-LOG_RATIO_LIMIT)
        # expm1 keeps the digits of small d, where exp(-d) - 1 cancels.
        return torch.expm1(-d) + d
    raise ValueError(f"unknown KL estimator {estimator!r}")
