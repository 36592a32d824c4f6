"""The token dispatcher against Megatron's, which sorts and exchanges rows on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

from converters.model_weights import load_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import build_batch
from megatron_gptoss.token_dispatcher import AlltoAllTokenDispatcher
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.reference import (
    TINY,
    documents,
    gradients,
    hf_model,
    mean_cross_entropy,
)

SAMPLES = documents([30, 5, 18, 26])


def train(parallel: ParallelConfig, patch: pytest.MonkeyPatch) -> tuple[dict[str, Tensor], int]:
    """Return the loss and all gradients of a step, and the number of sorts."""
    calls = 0

    def count(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return sort(*arguments, **named)

    sort = token_dispatcher.sort_chunks_by_idxs
    with patch.context() as counting:
        counting.setattr(token_dispatcher, "sort_chunks_by_idxs", count)
        model = build_model(TINY, parallel)
        load_hf_weights(model, TINY, hf_model(std=0.1).state_dict().__getitem__)
        trainer = PolicyTrainer(model, OptimizerConfig())
        loss = mean_cross_entropy(int(SAMPLES.loss_tokens.sum()))
        statistics = trainer.train_step([build_batch(SAMPLES)], loss, 0.0)
    results = gradients(trainer, TINY)
    results["loss"] = torch.tensor(statistics.sums["loss"])
    return results, calls


def train_twice(parallel: ParallelConfig) -> tuple[dict[str, Tensor], int, dict[str, Tensor], int]:
    """Return the results with this dispatcher, and those with all of Megatron's steps."""
    with pytest.MonkeyPatch.context() as patch:
        own = train(parallel, patch)
        patch.setattr(AlltoAllTokenDispatcher, "exchanges_tokens", True)
        return *own, *train(parallel, patch)


@pytest.mark.usefixtures("process_groups")
def test_one_rank_sorts_nothing_and_keeps_every_bit() -> None:
    own, sorts, megatrons, megatron_sorts = train_twice(ParallelConfig())
    assert megatron_sorts == 2 * TINY.num_layers
    assert sorts == 0
    assert own.keys() == megatrons.keys()
    for name, expected in megatrons.items():
        assert torch.equal(own[name], expected), name


def train_on_rank(rank: int, port: int) -> tuple[dict[str, Tensor], int, dict[str, Tensor], int]:
    torch.set_num_threads(1)
    parallel = ParallelConfig(world_size=2, expert=2)
    distributed.initialize(parallel, rank, port=port)
    try:
        return train_twice(parallel)
    finally:
        distributed.shutdown()


def test_two_expert_ranks_take_all_steps_of_megatron() -> None:
    for own, sorts, megatrons, megatron_sorts in run_distributed(train_on_rank, 2, free_port()):
        assert sorts == megatron_sorts == 2 * TINY.num_layers
        for name, expected in megatrons.items():
            assert torch.equal(own[name], expected), name
