"""What an update says of the tokens that it trained on. Plain data, for who records or reads it."""

from dataclasses import dataclass

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.user_error import UserError

FEWEST_TOKENS = 8
"""Sampled tokens that an episode needs before its mean says anything."""


class ForeignAnswer(UserError, RuntimeError):
    """An engine returned tokens that this policy has not sampled after these prompts."""


@dataclass(frozen=True)
class TrainedTokens:
    """What the updates of the policy computed of the tokens that they trained on: float32
    [tokens] of all samples end to end, in nats. 0 for the first token of each sample, NaN for all
    others of a sample that no update took."""

    log_probs: np.ndarray
    """The trainer's, with the weights that sampled the step as far as they are known
    (``algorithm.old_log_probs``)."""
    entropy: np.ndarray
    """Of the distribution that a token was drawn from."""


def check_sampled_by_policy(
    samples: TrainingSamples, trained: TrainedTokens | None, limit: float, step: int
) -> None:
    """Compare engine and trainer episode by episode: an answer to another request, or one of other
    weights, has valid tokens and log-probs, and only their values are out of place.

    Args:
        samples: what the step was trained on.
        trained: what its update computed; None if nobody records it, and then nothing is compared.
        limit: mean |log-prob difference| of an episode's sampled tokens, nats.
        step: for the message.

    Raises:
        ForeignAnswer: naming the episode that differs most, if it differs by more.
    """
    if trained is None or samples.rollout_log_probs is None:
        return

    is_compared = samples.loss_mask & np.isfinite(trained.log_probs)
    for column in (samples.staleness, samples.is_grafted):
        if column is not None:
            is_compared &= column == 0
    differences = np.abs(samples.rollout_log_probs - trained.log_probs)
    differences = np.where(is_compared, differences, 0)

    # The last offset is no place, and a sequence without tokens has none.
    ends = np.concatenate([[0.0], np.cumsum(differences, dtype=np.float64)])[samples.offsets]
    counts = np.diff(np.concatenate([[0], np.cumsum(is_compared)])[samples.offsets])
    means = np.where(counts >= FEWEST_TOKENS, np.diff(ends) / np.maximum(counts, 1), 0)
    if len(means) == 0 or not means.max() > limit:
        return

    worst = int(means.argmax())
    name = samples.names[worst] if samples.names else f"sample {worst}"
    raise ForeignAnswer(
        f"step {step + 1}: the policy has not sampled an episode of task {name}: engine and trainer "
        f"differ by {means[worst]:.3g} nats per token on {counts[worst]} tokens (at most {limit:g}), "
        "though both hold the same weights. An answer went to the wrong request, or log-probs are "
        "wrong. This step is not saved; --resume takes it again"
    )
