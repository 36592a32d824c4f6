"""What an update says of the tokens that it trained on. Plain data, for who records or reads it."""

from dataclasses import dataclass

import numpy as np


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
