"""Losses as sums, compared with their formulas in float64, and labels that are not the next token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.token_columns import ColumnError
from rl_loop.algorithms.summed_losses import (
    LOG_PROBS,
    SUMMED_LOSSES,
    SummedLoss,
    SummedLossName,
    summed_objective,
)

LOW, HIGH, BETA = 0.9, 1.1, 0.3
WEIGHTS = [0.0, 0.5, -1.5, 0.0, 2.0]
ADVANTAGES = [0.0, 1.5, -0.5, 0.0, -2.0]
OLD = [0.0, -1.0, -2.5, -0.25, -3.0]
LOG_PROB_VALUES = [-0.5, -1.2, -2.3, -0.5]
"""Log-probs of the labels. The ratios of those with an advantage are on both sides of the bounds."""

FORMULAS: dict[SummedLossName, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda p, w, a, q: -(w * p).sum(),
    "importance_sampling": lambda p, w, a, q: -((p - q).exp() * a).sum(),
    "ppo": lambda p, w, a, q: (
        -torch.minimum((p - q).exp() * a, (p - q).exp().clamp(LOW, HIGH) * a).sum()
    ),
    "cispo": lambda p, w, a, q: -((p - q).exp().clamp(LOW, HIGH).detach() * p * a).sum(),
    "dro": lambda p, w, a, q: -(p * a - BETA / 2 * (p - q) ** 2).sum(),
}


def batch_of(align: int = 8) -> PackedBatch:
    """Return a batch of one sequence and of padding."""
    sample = {
        "token_ids": [5, 6, 7, 8, 9],
        "loss_mask": [True] * 5,
        "target_ids": [0, 6, 0, 70_000, 9],
        "loss_weights": WEIGHTS,
        "advantages": ADVANTAGES,
        "rollout_log_probs": OLD,
    }
    return build_batch(TrainingSamples.join([sample]), align=align)


def test_labels_may_differ_from_the_next_token() -> None:
    batch = batch_of()
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 0, 0, 0, 0]
    assert batch.labels.tolist() == [6, 0, 70_000, 9, 0, 0, 0, 0]
    assert batch.column("loss_weights").tolist() == [0.5, -1.5, 0, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("name", SUMMED_LOSSES)
def test_summed_loss_equals_its_formula(name: SummedLossName) -> None:
    batch = batch_of()
    labels = torch.tensor(LOG_PROB_VALUES, dtype=torch.float64)
    log_probs = torch.cat([labels, torch.full((4,), -9.0)]).double().requires_grad_()
    objective = summed_objective(SummedLoss(name, clip_low=LOW, clip_high=HIGH, beta=BETA))
    output = objective(log_probs, torch.zeros(8), batch)
    output.loss.backward()

    expected_log_probs = labels.clone().requires_grad_()
    columns = [torch.tensor(column[1:]).double() for column in (WEIGHTS, ADVANTAGES, OLD)]
    expected = FORMULAS[name](expected_log_probs, *columns)
    expected.backward()
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert log_probs.grad[:4] == pytest.approx(expected_log_probs.grad, rel=1e-6, abs=1e-12)
    assert log_probs.grad[4:].tolist() == [0] * 4
    assert output.token_values[LOG_PROBS].tolist() == log_probs.tolist()


@pytest.mark.parametrize("name", [name for name in SUMMED_LOSSES if name != "dro"])
def test_impossible_labels_without_weight_have_no_loss(name: SummedLossName) -> None:
    log_probs = torch.tensor([-0.5, -1.2, -torch.inf, -0.5], requires_grad=True)
    output = summed_objective(SummedLoss(name))(log_probs, torch.zeros(4), batch_of(align=1))
    output.loss.backward()
    assert output.loss.isfinite()
    assert log_probs.grad.isfinite().all() and log_probs.grad[2] == 0


def test_loss_names_a_missing_column() -> None:
    batch = build_batch(TrainingSamples.join([{"token_ids": [1, 2], "loss_mask": [1, 1]}]))
    with pytest.raises(ColumnError, match="loss_weights"):
        summed_objective(SummedLoss("cross_entropy"))(torch.zeros(1), torch.zeros(1), batch)
