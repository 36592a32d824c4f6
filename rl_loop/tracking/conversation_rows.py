"""Conversations of supervised fine-tuning as episodes without a reward."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from rl_loop.data.trajectory import Trajectory, Turn


def read_conversation(
    samples: TrainingSamples, index: int, decode: Callable[[Sequence[int]], str]
) -> Trajectory:
    """Return one training sample as an episode. Its reward is NaN, because nothing judged it.

    Turns alternate between tokens in the loss, with the role "assistant", and context.

    Args:
        samples: samples of a step.
        index: index of the sample.
        decode: decoder of token ids.
    """
    place = slice(*samples.offsets[index : index + 2].tolist())
    ids = samples.token_ids[place]
    mask = samples.loss_mask[place].copy()
    # The first token is not predicted, so it is not in the loss.
    mask[:1] = False

    ends = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    turns = []
    for start, end in pairwise([0, *ends.tolist(), len(ids)]):
        if end > start:
            role = "assistant" if mask[start] else "prompt" if start == 0 else "user"
            turns.append(Turn(role, start, end, decode(ids[start:end].tolist())))
    return Trajectory(
        samples.sequence_name(index),
        token_ids=ids,
        loss_mask=mask,
        rollout_log_probs=np.zeros(len(ids), np.float32),
        turns=turns,
        reward=math.nan,
    )
