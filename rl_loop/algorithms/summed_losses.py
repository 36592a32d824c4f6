"""Losses as sums over tokens, with the log-prob of every label as a result.

Unlike the objectives of a run, they are not means: several passes add up to the loss of a step.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.step_results import LossFunction, LossOutput
from rl_loop.algorithms.policy_loss import LossInputs, cispo_loss, ppo_loss, zero_outside
from rl_loop.algorithms.sequences import SequenceIndex

SummedLossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]
SUMMED_LOSSES: tuple[SummedLossName, ...] = get_args(SummedLossName)
"""Names of the losses."""
LOG_PROBS = "log_probs"
"""Name of the per-token result: log-probs of the labels, in nats."""


@dataclass(frozen=True)
class SummedLoss:
    """A loss and its options.

    With r = exp(log_prob - rollout_log_prob), weight w and advantage A of a token:

    - ``cross_entropy``: -w log_prob
    - ``importance_sampling``: -r A
    - ``ppo``: -min(r A, clip(r) A)
    - ``cispo``: -clip(r) A log_prob, with a constant clip(r)
    - ``dro``: -(A log_prob - beta / 2 (log_prob - rollout_log_prob)^2)

    Tokens with A = 0 or w = 0 have no loss. ``dro`` is an exception: its penalty covers all tokens.
    """

    name: SummedLossName
    """Name of the loss."""
    clip_low: float = 0.8
    """Lower bound of the ratio."""
    clip_high: float = 1.2
    """Upper bound of the ratio."""
    beta: float = 0.05
    """Coefficient of the penalty of ``dro``."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the loss reads."""
        if self.name == "cross_entropy":
            return ("loss_weights",)
        return ("rollout_log_probs", "advantages")


def summed_objective(choice: SummedLoss) -> LossFunction:
    """Return the loss function of ``choice``. Padding has no loss."""

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch) -> LossOutput:
        total = _token_losses(choice, log_probs, batch).sum()
        # A copy, because the loss may be computed in place.
        results = {LOG_PROBS: log_probs.detach().clone()}
        return LossOutput(total, {"loss": total}, token_values=results)

    return loss


def _token_losses(choice: SummedLoss, log_probs: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return the loss of every label [tokens]."""
    is_label = batch.sample_ids >= 0
    if choice.name == "cross_entropy":
        weights = batch.column("loss_weights").to(log_probs.dtype)
        return -weights * zero_outside(is_label & (weights != 0), log_probs)

    advantages = batch.column("advantages").to(log_probs.dtype)
    old_log_probs = batch.column("rollout_log_probs").to(log_probs.dtype)
    # The penalty of dro does not depend on the advantage.
    trained = is_label if choice.name == "dro" else is_label & (advantages != 0)
    inputs = LossInputs(
        log_probs=zero_outside(trained, log_probs),
        old_log_probs=zero_outside(trained, old_log_probs),
        advantages=zero_outside(trained, advantages),
        mask=trained,
        sequences=SequenceIndex(batch.sample_ids, count=0),
        columns=batch.columns,
    )
    if choice.name == "importance_sampling":
        return -inputs.ratio() * inputs.advantages
    if choice.name == "dro":
        penalty = choice.beta / 2 * inputs.log_ratio().square()
        return penalty - inputs.advantages * inputs.log_probs

    # These options are distances from 1.
    low, high = 1 - choice.clip_low, choice.clip_high - 1
    clipped = ppo_loss if choice.name == "ppo" else cispo_loss
    return clipped(inputs, clip_low=low, clip_high=high).loss
