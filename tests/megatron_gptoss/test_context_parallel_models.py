"""Models under context parallelism have the gradients and log-probs of one rank.

Context parallelism runs alone and with every other kind of parallelism.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from converters.model_weights import export_hf_weights, load_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.reference import (
    TINY,
    documents,
    float64_training,
    hf_model,
    local_batches,
    mean_cross_entropy,
)
from tests.support.tolerances import assert_within, rounding_error

SAMPLES = documents([90, 5, 18, 41, 2, 3, 23, 12], seed=3)
LAYOUTS: dict[str, dict[str, Any]] = {
    "context 2": {"context": 2},
    "context 4": {"context": 4},
    "context 4, all-to-all": {
        "context": 4,
        "context_scheme_full": "all_to_all",
        "context_scheme_window": "all_to_all",
    },
    "context 2, tensor 2": {"context": 2, "tensor": 2},
    "context 2, tensor 2, expert 2": {"context": 2, "tensor": 2, "expert": 2},
    "context 2, expert 4": {"context": 2, "expert": 4},
    "context 2, pipeline 2": {"context": 2, "pipeline": 2},
}
WINDOWED: GptOssModelConfig = TINY.model_copy(update={"sliding_window": 16})
"""A rank's part of a sequence is shorter than the window with 4 ranks, and longer with 2."""
FIXED_SCHEMES = {"context_scheme_full": "all_gather", "context_scheme_window": "halo"}
"""Schemes of layouts that name none. ``auto`` could choose another scheme for each layout."""


def gradients(
    parallel: ParallelConfig, rank: int, port: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return all gradients by Hugging Face name (on rank 0) and the log-probs of every sample."""
    distributed.initialize(parallel, rank, port=port)
    try:
        model = build_model(WINDOWED, parallel, dtype)
        load_hf_weights(model, WINDOWED, hf_model(WINDOWED, std=0.15).state_dict().__getitem__)
        # No clipping, because the gradients themselves are compared.
        trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))
        batches = local_batches(SAMPLES, 256, parallel)
        tokens = int(SAMPLES.loss_tokens.sum())
        scores = {}
        for batch, values in zip(batches, trainer.score(batches), strict=True):
            for sample_id in batch.sample_ids[batch.sample_ids >= 0].unique().tolist():
                scores[sample_id] = values[batch.sample_ids == sample_id]
        step = trainer.train_step(batches, mean_cross_entropy(tokens), learning_rate=1e-9)
        # Replace the weights by their gradients, so that the export writes gradients under Hugging
        # Face names.
        for parameter in model.parameters():
            parameter.data = parameter.main_grad.clone()
        exported = {name: tensor.clone() for name, tensor in export_hf_weights(model, WINDOWED)}
        return {"gradients": exported, "scores": scores, "loss": step.sums["loss"]}
    finally:
        distributed.shutdown()


def every_layout(rank: int, ports: list[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        name: gradients(ParallelConfig(world_size=4, **(FIXED_SCHEMES | layout)), rank, port)
        for (name, layout), port in zip(LAYOUTS.items(), ports, strict=True)
    }


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return gradients(ParallelConfig(), 0, free_port())


@pytest.fixture(scope="module")
def exact() -> dict[str, Any]:
    """Train one rank in float64."""
    with float64_training():
        return gradients(ParallelConfig(), 0, free_port(), torch.float64)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_distributed(every_layout, 4, [free_port() for _ in LAYOUTS])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_gradients_of_a_model_equal_those_of_one_rank(
    layout: str,
    one_rank: dict[str, Any],
    exact: dict[str, Any],
    four_ranks: list[dict[str, Any]],
) -> None:
    got = four_ranks[0][layout]["gradients"]
    assert got.keys() == one_rank["gradients"].keys()
    for name, want in one_rank["gradients"].items():
        allowed = rounding_error(want, exact["gradients"][name])
        assert_within(got[name], want, allowed, f"gradient of {name}")
        assert allowed < 1e-3 * want.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_come_back_in_the_order_of_the_samples(
    layout: str,
    one_rank: dict[str, Any],
    exact: dict[str, Any],
    four_ranks: list[dict[str, Any]],
) -> None:
    loss = torch.tensor(one_rank["loss"])
    seen: dict[int, torch.Tensor] = {}
    for rank in four_ranks:
        allowed = rounding_error(loss, torch.tensor(exact["loss"], dtype=torch.float64))
        assert_within(torch.tensor(rank[layout]["loss"]), loss, allowed)
        seen |= rank[layout]["scores"]
    assert seen.keys() == one_rank["scores"].keys()
    for sample_id, want in one_rank["scores"].items():
        allowed = rounding_error(want, exact["scores"][sample_id])
        assert_within(seen[sample_id], want, allowed, sample_id)
        assert allowed < 1e-3
