"""What updates compute of the tokens that they train on, on its way to the driver: a rank takes it
out of its updates' statistics, and the driver brings that of all ranks into the order of its
samples."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch

from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import StepStatistics
from rl_loop.algorithms.objectives import RETURNED_VALUES
from rl_loop.data.trained_tokens import TrainedTokens
from rl_loop.trainer.rank_inputs import MiniBatch, Shipment, StepPlan


def take_tokens(
    updates: Sequence[StepStatistics], mini_batches: Sequence[MiniBatch], shipment: Shipment
) -> TrainedTokens | None:
    """Take what the updates of this rank's mini-batches returned of tokens out of their
    statistics, which all ranks have alike. None if there is nothing, as on pipeline stages before
    the last."""
    taken = [update.token_values for update in updates]
    for update in updates:
        update.token_values = {}
    if not any(taken):
        return None

    columns = {}
    for name in RETURNED_VALUES:
        of_updates = iter(taken)
        rows: list[torch.Tensor] = []
        for mini_batch in mini_batches:
            if mini_batch.is_empty:
                rows += [torch.full((b.tokens,), torch.nan) for b in mini_batch.micro_batches]
            else:
                rows += next(of_updates)[name]
        columns[name] = shipment.column_of(rows, np.dtype(np.float32))
    return TrainedTokens(log_probs=columns["trainer_log_probs"], entropy=columns["entropy"])


def place_tokens(
    samples: TrainingSamples, plan: StepPlan, answers: Sequence[TrainedTokens | None]
) -> TrainedTokens | None:
    """Join what the data-parallel ranks return of tokens; None if no update of the policy took
    place."""
    # All ranks take the same mini-batches.
    if answers[0] is None:
        return None
    columns = {}
    for field in fields(TrainedTokens):
        of_ranks = [getattr(answer, field.name) for answer in answers]
        columns[field.name] = plan.place_answers(
            samples, of_ranks, field.name, np.dtype(np.float32)
        )
    return TrainedTokens(**columns)
