"""Per-token results of updates.

A rank takes them from the statistics of its updates, and the driver gathers those of all ranks.
"""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch

from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import StepStatistics
from rl_loop.algorithms.objectives import RETURNED_VALUES
from rl_loop.data.response_check import TrainedTokens
from rl_loop.trainer.rank_inputs import RankInputs
from rl_loop.trainer.step_plan import StepPlan


def take_tokens(
    updates: Sequence[StepStatistics], packed: Sequence[Sequence[PackedBatch]], inputs: RankInputs
) -> TrainedTokens | None:
    """Take this rank's per-token results out of the statistics, which are equal on all ranks.

    Args:
        updates: statistics of each mini-batch that is not empty.
        packed: micro-batches of each mini-batch in ``inputs``.
        inputs: sequences of the rank.

    Returns:
        None if there are no results, as on pipeline stages before the last.
    """
    token_values = [update.token_values for update in updates]
    # The driver reads the statistics of rank 0 only, but these values belong to this rank's
    # tokens.
    for update in updates:
        update.token_values = {}
    # Stages before the last do not compute log-probs.
    if not any(token_values):
        return None

    columns = {}
    for name in RETURNED_VALUES:
        # Empty mini-batches have no update, so updates are matched with the others in order.
        update_results = iter(token_values)
        rows: list[torch.Tensor] = []
        for mini_batch, batches in zip(inputs.mini_batches, packed, strict=True):
            # Without an update there are no values. NaN marks them, so that they enter no mean
            # unnoticed.
            if mini_batch.is_empty:
                rows += [torch.full((len(batch.labels),), torch.nan) for batch in batches]
            else:
                rows += next(update_results)[name]
        columns[name] = inputs.to_column(rows, np.dtype(np.float32))
    return TrainedTokens(log_probs=columns["trainer_log_probs"], entropy=columns["entropy"])


def gather_tokens(
    samples: TrainingSamples, plan: StepPlan, results: Sequence[TrainedTokens | None]
) -> TrainedTokens | None:
    """Join the results of the data-parallel ranks. Returns None without an update of the policy."""
    # All ranks take the same mini-batches.
    if results[0] is None:
        return None
    columns = {}
    for field in fields(TrainedTokens):
        rank_results = [getattr(result, field.name) for result in results]
        columns[field.name] = plan.gather_results(
            samples, rank_results, field.name, np.dtype(np.float32)
        )
    return TrainedTokens(**columns)
