"""What an update says of the tokens that it trained on. Plain data, for who records or reads it."""

from dataclasses import dataclass

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.user_error import UserError

FEWEST_TOKENS = 8
"""Sampled tokens that an episode needs before its mean says anything."""

BLOCK_TOKENS = 2**14
"""Compared at a time: temporaries stay in the cache. Those of a whole step are new pages of the
system each time, which takes longer than the arithmetic."""


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
        trained: values that the update computed; None if no update of the policy took place.
        limit: mean |log-prob difference| of an episode's sampled tokens, nats.
        step: for the message.

    Raises:
        ForeignAnswer: naming the episode that differs most, if it differs by more.
    """
    if trained is None or samples.rollout_log_probs is None:
        return

    sums, counts = _differences(samples, trained)
    means = np.where(counts >= FEWEST_TOKENS, sums / np.maximum(counts, 1), 0)
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


def _differences(samples: TrainingSamples, trained: TrainedTokens) -> tuple[np.ndarray, np.ndarray]:
    """Compare engine and trainer. Returns of each sequence the sum of |log-prob differences| of its
    compared tokens, nats, and the number of those: float64 and int64 [sequences]."""
    assert samples.rollout_log_probs is not None
    sums = np.zeros(len(samples))
    counts = np.zeros(len(samples), np.int64)

    starts = samples.offsets[:-1]
    for begin in range(0, samples.tokens, BLOCK_TOKENS):
        block = slice(begin, min(begin + BLOCK_TOKENS, samples.tokens))
        log_probs = trained.log_probs[block]
        is_compared = samples.loss_mask[block] & np.isfinite(log_probs)
        for column in (samples.staleness, samples.is_grafted):
            if column is not None:
                is_compared &= column[block] == 0
        differences = np.abs(samples.rollout_log_probs[block] - log_probs)
        differences[~is_compared] = 0

        first = np.searchsorted(starts, block.start, side="right") - 1
        whose = slice(first, np.searchsorted(starts, block.stop))
        pieces = np.maximum(starts[whose] - begin, 0)
        sums[whose] += np.add.reduceat(differences, pieces, dtype=np.float64)
        counts[whose] += np.add.reduceat(is_compared, pieces, dtype=np.int64)
    return sums, counts
