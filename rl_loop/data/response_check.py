"""Per-token results of an update, and their comparison with the engine's log-probs. Plain data."""

from dataclasses import dataclass

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.user_error import UserError

MIN_TOKENS = 8
"""Minimum sampled tokens of an episode for a meaningful mean."""

BLOCK_TOKENS = 2**14
"""Number of tokens that are compared at a time, so that temporaries stay in the cache. Temporaries
of a whole step would need new pages every time, which takes longer than the arithmetic."""


class ResponseMismatchError(UserError, RuntimeError):
    """An engine returned tokens that this policy has not sampled after these prompts."""


@dataclass(frozen=True)
class TrainedTokens:
    """Per-token results of the policy's updates: float32 [tokens], in nats.

    The samples are in sequence. The first token of each sample has 0. Other tokens have NaN if no
    update took their sample.
    """

    log_probs: np.ndarray
    """Log-probs of the trainer, with the weights that sampled the step as far as they are known
    (``algorithm.old_log_probs``)."""
    entropy: np.ndarray
    """Entropy of the distribution from which a token was sampled."""


def check_sampled_by_policy(
    samples: TrainingSamples, trained: TrainedTokens | None, limit: float, step: int
) -> None:
    """Check that engine and trainer agree on every sequence of every episode.

    An answer to another request, or of other weights, has valid tokens and log-probs. Only the
    values differ.

    Args:
        samples: samples of the step.
        trained: results of the update. None without an update of the policy.
        limit: maximum mean |log-prob difference| of a sequence's sampled tokens, in nats. Sequences
            with fewer than MIN_TOKENS compared tokens are not checked.
        step: index of the step, for the message.

    Raises:
        ResponseMismatchError: an episode exceeds ``limit``. The message names the worst episode.
    """
    if trained is None or samples.rollout_log_probs is None:
        return

    sums, counts = _differences(samples, trained)
    # ``maximum`` avoids a division by 0 in sequences without compared tokens.
    means = np.where(counts >= MIN_TOKENS, sums / np.maximum(counts, 1), 0)
    if len(means) == 0 or not means.max() > limit:
        return

    worst = int(means.argmax())
    # The worst one is named, because it is the clearest evidence.
    name = samples.names[worst] if samples.names else f"sample {worst}"
    raise ResponseMismatchError(
        f"step {step + 1}: the policy has not sampled an episode of task {name}: engine and "
        f"trainer differ by {means[worst]:.3g} nats per token on {counts[worst]} tokens (limit "
        f"{limit:g}), although both have the same weights. Either a response belongs to another "
        "request, or log-probs are wrong. The step was not saved. Continue with --resume, which "
        "repeats it"
    )


def _differences(samples: TrainingSamples, trained: TrainedTokens) -> tuple[np.ndarray, np.ndarray]:
    """Compare engine and trainer.

    Returns:
        For each sequence, the sum of |log-prob differences| over compared tokens, in nats, and the
        number of compared tokens: float64 and int64 [sequences].
    """
    assert samples.rollout_log_probs is not None
    sums = np.zeros(len(samples))
    counts = np.zeros(len(samples), np.int64)

    starts = samples.offsets[:-1]
    for begin in range(0, samples.tokens, BLOCK_TOKENS):
        block = slice(begin, min(begin + BLOCK_TOKENS, samples.tokens))
        log_probs = trained.log_probs[block]
        # NaN marks tokens of samples that no update took.
        is_compared = samples.loss_mask[block] & np.isfinite(log_probs)
        # Older weights or another context sampled these tokens, so a difference is expected.
        for column in (samples.staleness, samples.is_off_policy):
            if column is not None:
                is_compared &= column[block] == 0
        differences = np.abs(samples.rollout_log_probs[block] - log_probs)
        differences[~is_compared] = 0

        # The sequences in this block, and the positions in the block where they begin.
        first = np.searchsorted(starts, block.start, side="right") - 1
        whose = slice(first, np.searchsorted(starts, block.stop))
        pieces = np.maximum(starts[whose] - begin, 0)
        sums[whose] += np.add.reduceat(differences, pieces, dtype=np.float64)
        counts[whose] += np.add.reduceat(is_compared, pieces, dtype=np.int64)
    return sums, counts
