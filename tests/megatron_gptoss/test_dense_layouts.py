"""Dense decoders train like one process in every layout, and checkpoints change layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from converters.model_weights import export_hf_weights, load_hf_weights
from converters.torch_dist import import_checkpoint
from converters.verify import verify
from megatron_gptoss import distributed
from megatron_gptoss.checkpoint.directory import latest_checkpoint
from megatron_gptoss.checkpoint.loader import load_checkpoint, load_model_weights
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.critic import ValueTrainer, make_critic
from megatron_gptoss.model import build_model
from megatron_gptoss.step_results import LossOutput
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.converters.dense_models import save_dense
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.dense_reference import MODELS, dense_weights
from tests.support.megatron_gptoss.reference import (
    documents,
    float64_training,
    gradients,
    local_batches,
    mean_cross_entropy,
    save_checkpoint,
    unpack,
)
from tests.support.tolerances import assert_same_training

SAMPLES = documents([30, 5, 18, 26, 11, 2, 23, 9], seed=3)
TOKENS = int(SAMPLES.loss_tokens.sum())
STEPS = 4
LAYOUTS: dict[str, dict[str, int]] = {
    "data": {},
    "tensor+sequence": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "virtual_pipeline": 2},
    "uneven pipeline": {"pipeline": 2, "last_stage_layers": 1},
    "context": {"context": 2},
}
TRAINED = ["llama", "qwen2, tied"]


def train(
    name: str,
    parallel: ParallelConfig,
    rank: int,
    port: int,
    save_under: Path | None = None,
    resume: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return losses and gradient norms of several steps, final gradients and final scores.

    Args:
        save_under: directory that gets a checkpoint after half of the steps.
        resume: such a checkpoint. Only the other half of the steps then runs.
    """
    config = MODELS[name]
    distributed.initialize(parallel, rank, port=port)
    try:
        model = build_model(config, parallel, dtype)
        weights = dense_weights(config, std=0.1)
        load_hf_weights(model, config, weights.__getitem__)
        for tensor_name, tensor in export_hf_weights(model, config):
            assert torch.equal(tensor, weights[tensor_name].to(dtype)), tensor_name

        trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1.0))
        limit = 32 if parallel.virtual_pipeline > 1 else 64
        batches = local_batches(SAMPLES, limit, parallel)
        if resume:
            load_checkpoint(resume, trainer)
        steps = []
        for step in range(STEPS // 2 if resume else 0, STEPS):
            if save_under and step == STEPS // 2:
                save_checkpoint(save_under, trainer, step, {})
            steps.append(trainer.train_step(batches, mean_cross_entropy(TOKENS), 3e-3))

        scores: dict[int, np.ndarray] = {}
        for values, batch in zip(trainer.score(batches), batches, strict=True):
            scores |= unpack(values, batch)
        return {
            "losses": [step.sums["loss"] for step in steps],
            "norms": [step.grad_norm for step in steps],
            "gradients": gradients(trainer, config),
            "scores": scores,
        }
    finally:
        distributed.shutdown()


def train_every_layout(rank: int, ports: list[int], root: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    port = iter(ports)
    return {
        (name, layout): train(
            name, ParallelConfig(world_size=2, **sizes), rank, next(port), root / name / layout
        )
        for name in TRAINED
        for layout, sizes in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dense_layouts")


@pytest.fixture(scope="module")
def two_ranks(checkpoints: Path) -> list[dict[Any, Any]]:
    ports = [free_port() for _ in TRAINED for _ in LAYOUTS]
    return run_distributed(train_every_layout, 2, ports, checkpoints)


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return {name: train(name, ParallelConfig(), 0, free_port()) for name in TRAINED}


@pytest.fixture(scope="module")
def exact() -> dict[str, Any]:
    """Train one process in float64."""
    with float64_training():
        return {
            name: train(name, ParallelConfig(), 0, free_port(), dtype=torch.float64)
            for name in TRAINED
        }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TRAINED)
def test_every_layout_trains_as_one_process(
    name: str,
    layout: str,
    one_rank: dict[str, Any],
    exact: dict[str, Any],
    two_ranks: list[dict[Any, Any]],
) -> None:
    ranks = [rank[name, layout] for rank in two_ranks]
    check_equals_one_process(one_rank[name], exact[name], ranks)


def check_equals_one_process(
    one: dict[str, Any], exact: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    assert one["losses"][-1] < one["losses"][0] - 0.2
    for rank in ranks:
        parameters = sum(tensor.numel() for tensor in one["gradients"].values())
        for name, terms in (("losses", TOKENS), ("norms", parameters)):
            assert_same_training(rank[name], one[name], exact[name], terms, name)

    for tensor, want in one["gradients"].items():
        got = ranks[0]["gradients"][tensor]
        scale = want.abs().max().item()
        torch.testing.assert_close(got, want, atol=2e-3 * scale, rtol=0)

    scores = {i: row for rank in ranks for i, row in rank["scores"].items()}
    assert scores.keys() == one["scores"].keys()
    for i, row in scores.items():
        assert row == pytest.approx(one["scores"][i], abs=2e-3)


COMBINED: dict[str, dict[str, int]] = {
    "tensor, pipeline, context": {"tensor": 2, "pipeline": 2, "context": 2},
    "tensor, pipeline, data": {"tensor": 2, "pipeline": 2},
    "tensor, context, data": {"tensor": 2, "context": 2},
    "interleaved, context, data": {"pipeline": 2, "virtual_pipeline": 2, "context": 2},
}
"""Layouts of 8 ranks: every pair of the 4 kinds, and the 3 that split a sample together."""


def train_combined_layouts(rank: int, ports: list[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        layout: train("qwen2, tied", ParallelConfig(world_size=8, **sizes), rank, port)
        for (layout, sizes), port in zip(COMBINED.items(), ports, strict=True)
    }


@pytest.mark.slow
def test_combined_layouts_train_as_one_process(
    one_rank: dict[str, Any], exact: dict[str, Any]
) -> None:
    ports = [free_port() for _ in COMBINED]
    eight_ranks = run_distributed(train_combined_layouts, 8, ports)
    for layout in COMBINED:
        ranks = [rank[layout] for rank in eight_ranks]
        check_equals_one_process(one_rank["qwen2, tied"], exact["qwen2, tied"], ranks)


RESUMED = [
    ("tensor+sequence", "tensor+sequence"),
    ("pipeline", "context"),
    ("data", "pipeline"),
    ("interleaved", "uneven pipeline"),
]


def resume_in_other_layouts(rank: int, ports: list[int], root: Path) -> list[Any]:
    torch.set_num_threads(1)
    port = iter(ports)
    results = []
    for name in TRAINED:
        for saved, layout in RESUMED:
            checkpoint = latest_checkpoint(root / name / saved)
            parallel = ParallelConfig(world_size=2, **LAYOUTS[layout])
            run = train(name, parallel, rank, next(port), resume=checkpoint)
            results.append((name, saved, layout, run["losses"]))
    return results


@pytest.mark.slow  # test_parallel_layouts.py has it for GPT-OSS
def test_optimizer_checkpoint_continues_in_another_layout(
    one_rank: dict[str, Any],
    exact: dict[str, Any],
    two_ranks: list[dict[Any, Any]],
    checkpoints: Path,
) -> None:
    ports = [free_port() for _ in TRAINED for _ in RESUMED]
    results = run_distributed(resume_in_other_layouts, 2, ports, checkpoints)[0]
    assert len(results) == len(TRAINED) * len(RESUMED)
    for name, saved, layout, losses in results:
        assert len(losses) == STEPS - STEPS // 2
        expected = (one_rank[name]["losses"], exact[name]["losses"])
        assert_same_training(losses, *expected, TOKENS, f"{name}, {saved} -> {layout}")


def load_and_save(rank: int, ports: list[int], imported: Path, out: Path) -> None:
    layouts = ("tensor+sequence", "pipeline")
    for layout, port in zip(layouts, ports, strict=True):
        parallel = ParallelConfig(world_size=2, **LAYOUTS[layout])
        distributed.initialize(parallel, rank, port=port)
        model = build_model(MODELS["qwen2, tied"], parallel, torch.float32)
        trainer = PolicyTrainer(model, OptimizerConfig())
        load_model_weights(imported, model)
        save_checkpoint(out / layout, trainer, 1, {})
        distributed.shutdown()


def test_import_loads_in_any_layout_and_saves_the_same_model(
    tmp_path: Path,
) -> None:
    config = MODELS["qwen2, tied"]
    source = save_dense(tmp_path / "hf", config)
    import_checkpoint(source, tmp_path / "megatron")
    ports = [free_port(), free_port()]
    run_distributed(load_and_save, 2, ports, tmp_path / "megatron", tmp_path / "saved")
    for layout in ("tensor+sequence", "pipeline"):
        assert verify(source, tmp_path / "saved" / layout / "step_000001").equal, layout


def value_loss(values: torch.Tensor, batch: Any) -> LossOutput:
    loss = (values - 1).square().mul(batch.loss_mask).sum() / TOKENS
    return LossOutput(loss, {"loss": loss})


def train_critic(rank: int, ports: list[int]) -> list[list[float]]:
    torch.set_num_threads(1)
    config = MODELS["qwen2, tied"]
    results = []
    for layout, port in zip(("pipeline", "tensor+sequence"), ports, strict=True):
        parallel = ParallelConfig(world_size=2, **LAYOUTS[layout])
        results.append(critic_losses(config, parallel, rank, port))
    return results


def critic_losses(config: Any, parallel: ParallelConfig, rank: int, port: int) -> list[float]:
    distributed.initialize(parallel, rank, port=port)
    try:
        model = build_model(config, parallel, torch.float32)
        load_hf_weights(model, config, dense_weights(config, std=0.1).__getitem__)
        trainer = ValueTrainer(make_critic(model), OptimizerConfig())
        batches = local_batches(SAMPLES, 64, parallel)
        steps = [trainer.train_step(batches, value_loss, 1e-3) for _ in range(3)]
        return [step.sums["loss"] for step in steps]
    finally:
        distributed.shutdown()


def test_pipelined_critic_of_tied_model_equals_one_process() -> None:
    one = critic_losses(MODELS["qwen2, tied"], ParallelConfig(), 0, free_port())
    assert one[0] == pytest.approx(1.0) and one[-1] < one[0]
    for rank in run_distributed(train_critic, 2, [free_port(), free_port()]):
        for losses in rank:
            assert losses == pytest.approx(one, rel=1e-5)
