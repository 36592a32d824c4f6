"""Two gloo processes under every kind of parallelism train exactly as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from converters.live import load_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import pack
from megatron_gptoss.trainer import PolicyTrainer, alignment, data_parallel_slice
from tests.distributed import free_port, run_distributed
from tests.megatron_gptoss.reference import TINY, documents, hf_model, mean_cross_entropy

SAMPLES = documents([30, 5, 18, 26, 11, 2, 23, 9], seed=3)
STEPS = 6
LAYOUTS = {
    "data": {},
    "expert": {"expert": 2},
    "pipeline": {"pipeline": 2},
    "tensor+sequence": {"tensor": 2},
    "tensor+sequence+expert": {"tensor": 2, "expert": 2},
    "context": {"context": 2},
}


def train(parallel: ParallelConfig, rank: int, port: int) -> dict[str, Any]:
    """Losses and gradient norms of a few steps, and the log-probs of the trained policy."""
    distributed.initialize(parallel, rank, port=port)
    try:
        model = build_model(TINY, parallel, torch.float32)
        load_hf_weights(model, TINY, hf_model(std=0.1).state_dict().__getitem__)
        trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1.0))
        batches = data_parallel_slice(pack(SAMPLES, 64, parallel.data, alignment()))
        tokens = sum(len(sample.token_ids) - 1 for sample in SAMPLES)
        steps = [trainer.train_step(batches, mean_cross_entropy(tokens), 3e-3) for _ in range(STEPS)]
        scores = trainer.score(batches)
        return {
            "losses": [step.sums["loss"] for step in steps],
            "norms": [step.grad_norm for step in steps],
            "scored": {tuple(batch.labels.tolist()): values for batch, values in zip(batches, scores, strict=True)},
        }
    finally:
        distributed.shutdown()


def train_every_layout(rank: int, ports: list[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        name: train(ParallelConfig(world_size=2, **layout), rank, port)
        for (name, layout), port in zip(LAYOUTS.items(), ports, strict=True)
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_distributed(train_every_layout, 2, [free_port() for _ in LAYOUTS])


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return train(ParallelConfig(), 0, free_port())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_equal_those_of_one_process(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    for rank in two_ranks:
        assert rank[layout]["losses"] == pytest.approx(one_rank["losses"], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_norms_equal_those_of_one_process(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    # sees a gradient that is counted twice or not at all, which the first losses would hide
    for rank in two_ranks:
        assert rank[layout]["norms"] == pytest.approx(one_rank["norms"], rel=2e-4)


@pytest.mark.parametrize("layout", ["pipeline", "tensor+sequence", "context"])
def test_scores_reach_every_rank_in_order(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    for rank in two_ranks:
        assert len(rank[layout]["scored"]) == len(one_rank["scored"])
        for (labels, values), (want_labels, want) in zip(
            rank[layout]["scored"].items(), one_rank["scored"].items(), strict=True
        ):
            n = len(want_labels)
            assert labels[:n] == want_labels
            torch.testing.assert_close(values[:n], want, atol=2e-3, rtol=0)
