"""Two gloo ranks train exactly like one process under every kind of parallelism."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from converters.model_weights import export_hf_weights, load_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.checkpoint.directory import latest_checkpoint
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.loader import load_checkpoint
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import StepStatistics
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.layouts import LAYOUTS
from tests.support.megatron_gptoss.reference import (
    TINY,
    documents,
    float64_training,
    gradients,
    hf_model,
    local_batches,
    mean_cross_entropy,
    save_checkpoint,
    unpack,
)
from tests.support.tolerances import assert_same_training

SAMPLES = documents([30, 5, 18, 26, 11, 2, 23, 9], seed=3)
TOKENS = int(SAMPLES.loss_tokens.sum())
STEPS = 4


def packed(samples: TrainingSamples, parallel: ParallelConfig) -> list[PackedBatch]:
    """Return this rank's rows. There are enough for the steady state of an interleaved pipeline."""
    limit = 32 if parallel.virtual_pipeline > 1 else 64
    return local_batches(samples, limit, parallel)


def compute_scores(
    trainer: PolicyTrainer, samples: TrainingSamples, parallel: ParallelConfig
) -> dict[int, np.ndarray]:
    batches = packed(samples, parallel)
    scores = zip(trainer.score(batches), batches, strict=True)
    return {i: row for values, batch in scores for i, row in unpack(values, batch).items()}


def step_with_nan_behind_layer(
    number: int, trainer: PolicyTrainer, batches: Sequence[PackedBatch]
) -> StepStatistics:
    def poison(module: object, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        output[0].register_hook(lambda gradient: gradient * torch.nan)

    for chunk in trainer.chunks:
        for layer in chunk.decoder.layers:
            if layer.layer_number == number:
                layer.register_forward_hook(poison)
    return trainer.train_step(batches, mean_cross_entropy(1), 0.0)


def train(
    parallel: ParallelConfig,
    rank: int,
    port: int,
    save_under: Path | None = None,
    resume: Path | None = None,
    config: GptOssModelConfig = TINY,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return losses and gradient norms of several steps, and the final log-probs.

    Args:
        save_under: directory that gets a checkpoint after half of the steps.
        resume: such a checkpoint. Only the other half of the steps then runs.
    """
    distributed.initialize(parallel, rank, port=port)
    try:
        model = build_model(config, parallel, dtype)
        load_hf_weights(model, config, hf_model(config, std=0.1).state_dict().__getitem__)
        trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1.0))

        hf_weights = hf_model(config, std=0.1).state_dict()
        for name, tensor in export_hf_weights(model, config):
            assert torch.equal(tensor, hf_weights[name].to(dtype)), name

        batches = packed(SAMPLES, parallel)
        tokens = int(SAMPLES.loss_tokens.sum())
        if resume:
            load_checkpoint(resume, trainer)
        steps = []
        for step in range(STEPS // 2 if resume else 0, STEPS):
            if save_under and step == STEPS // 2:
                save_checkpoint(save_under, trainer, step, {})
            steps.append(trainer.train_step(batches, mean_cross_entropy(tokens), 3e-3))
            assert 0.5 < sum(steps[-1].seconds_by_part.values()) / steps[-1].seconds < 1.01
            assert min(steps[-1].seconds_by_part.values()) > 0

        trained = {
            "losses": [step.sums["loss"] for step in steps],
            "norms": [step.grad_norm for step in steps],
            "loads": steps[0].expert_loads,
            "padding": sum(int((batch.sample_ids < 0).sum()) for batch in batches),
            "gradients": gradients(trainer, config),
            "scores": compute_scores(trainer, SAMPLES, parallel),
            "alone": compute_scores(trainer, SAMPLES.take([0]), parallel),
            "not finite": None,
        }
        if parallel.pipeline > 1:
            trained["not finite"] = step_with_nan_behind_layer(
                3, trainer, batches
            ).non_finite_gradients
        return trained
    finally:
        distributed.shutdown()


def train_every_layout(rank: int, ports: list[int], checkpoints: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        name: train(ParallelConfig(world_size=2, **layout), rank, port, checkpoints / name)
        for (name, layout), port in zip(LAYOUTS.items(), ports, strict=True)
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def two_ranks(checkpoints: Path) -> list[dict[str, Any]]:
    return run_distributed(train_every_layout, 2, [free_port() for _ in LAYOUTS], checkpoints)


@pytest.fixture(scope="module")
def one_rank(checkpoints: Path) -> dict[str, Any]:
    return train(ParallelConfig(), 0, free_port(), checkpoints / "one")


def number_of_values(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


@pytest.fixture(scope="module")
def exact() -> dict[str, Any]:
    """Train one process in float64."""
    with float64_training():
        return train(ParallelConfig(), 0, free_port(), dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_equal_those_of_one_process(
    layout: str,
    one_rank: dict[str, Any],
    exact: dict[str, Any],
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        assert_same_training(
            rank[layout]["losses"], one_rank["losses"], exact["losses"], TOKENS, "loss"
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_norms_equal_those_of_one_process(
    layout: str,
    one_rank: dict[str, Any],
    exact: dict[str, Any],
    two_ranks: list[dict[str, Any]],
) -> None:
    # norms show a gradient that is missing or counted twice, unlike the first losses
    parameters = number_of_values(one_rank["gradients"])
    for rank in two_ranks:
        assert_same_training(
            rank[layout]["norms"], one_rank["norms"], exact["norms"], parameters, "norm"
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_equals_that_of_one_process(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    for name, wanted in one_rank["gradients"].items():
        scale = wanted.abs().max().item()
        torch.testing.assert_close(
            two_ranks[0][layout]["gradients"][name], wanted, atol=2e-3 * scale, rtol=0
        )


def loads_in_transformers() -> torch.Tensor:
    """Return the loads [layers, experts] before training."""
    model = hf_model(TINY, std=0.1)
    counts = torch.zeros(TINY.num_layers, TINY.num_experts)

    def count(layer: int, output: tuple[torch.Tensor, ...]) -> None:
        chosen = output[-1]  # [tokens, experts per token]
        counts[layer] += torch.bincount(chosen.flatten(), minlength=TINY.num_experts)

    for number, layer in enumerate(model.model.layers):
        layer.mlp.router.register_forward_hook(
            lambda module, inputs, output, number=number: count(number, output)
        )
    with torch.no_grad():
        for first, last in pairwise(SAMPLES.offsets.tolist()):
            # The last token of a sequence predicts nothing, so the trainer leaves it out.
            model(torch.tensor(SAMPLES.token_ids[first : last - 1].astype(np.int64))[None])
    return counts / counts.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expert_loads_equal_those_of_transformers(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    expected = loads_in_transformers()
    smallest, largest = expected.min().item(), expected.max().item()
    assert smallest < 0.5 and largest > 1.5
    mean_tokens = TOKENS * TINY.experts_per_token / TINY.num_experts
    for trained in (one_rank, *(rank[layout] for rank in two_ranks)):
        # Routers also route padding. One process has none.
        tolerance = trained["padding"] / mean_tokens + 1e-6
        assert trained["loads"].smallest == pytest.approx(smallest, abs=tolerance)
        assert trained["loads"].largest == pytest.approx(largest, abs=tolerance)
    assert one_rank["padding"] == 0


@pytest.mark.parametrize("samples", ["scores", "alone"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sample_is_scored_however_many_there_are(
    layout: str, samples: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    found = {i: row for rank in two_ranks for i, row in rank[layout][samples].items()}
    assert found.keys() == one_rank[samples].keys()
    for i, row in found.items():
        assert row == pytest.approx(one_rank[samples][i], abs=2e-3)


@pytest.mark.parametrize(
    ("layout", "place"), [("pipeline", "rank 1, chunk 0"), ("interleaved", "rank 0, chunk 1")]
)
def test_first_layer_with_nan_is_named_last(
    layout: str, place: str, two_ranks: list[dict[str, Any]]
) -> None:
    for rank in two_ranks:
        message = rf"first is embedding.\S+ \(rank 0, chunk 0\), the last is decoder.layers.0.\S+ \({place}\)\."
        assert re.search(message, rank[layout]["not finite"]), rank[layout]["not finite"]


# micro-batches of many lengths, and a stage that is neither the first nor the last
DEEP = TINY.model_copy(update={"num_layers": 6})


def train_deep(rank: int, port: int) -> dict[str, Any]:
    return train(
        ParallelConfig(world_size=3, pipeline=3, virtual_pipeline=2), rank, port, config=DEEP
    )


def test_messages_between_three_stages_are_not_mixed_up() -> None:
    one = train(ParallelConfig(), 0, free_port(), config=DEEP)
    with float64_training():
        exact = train(ParallelConfig(), 0, free_port(), config=DEEP, dtype=torch.float64)
    for rank in run_distributed(train_deep, 3, free_port()):
        for name, terms in (("losses", TOKENS), ("norms", number_of_values(one["gradients"]))):
            assert_same_training(rank[name], one[name], exact[name], terms, name)


RESUMED = {"one": ["interleaved"], "pipeline": ["context"], "expert": ["tensor+sequence"]}
"""{layout of a checkpoint: layouts that load it}. Every kind of parallelism is in one pair."""
ALSO_RESUMED = {
    "one": ["data", "context"],
    "interleaved": ["uneven pipeline"],
    "uneven pipeline": ["pipeline"],
    "expert": ["tensor+sequence+expert"],
    "tensor+sequence+expert": ["expert"],
}


def resume_in_other_layouts(
    rank: int, resumed: dict[str, list[str]], ports: list[int], checkpoints: Path
) -> list[tuple[str, str, list[float]]]:
    torch.set_num_threads(1)
    results = []
    port = iter(ports)
    for saved, others in resumed.items():
        for name in others:
            checkpoint = latest_checkpoint(checkpoints / saved)
            run = train(
                ParallelConfig(world_size=2, **LAYOUTS[name]), rank, next(port), resume=checkpoint
            )
            results.append((saved, name, run["losses"]))
    return results


@pytest.mark.parametrize(
    "resumed",
    [
        pytest.param(RESUMED, id="every kind"),
        pytest.param(ALSO_RESUMED, id="other pairs", marks=pytest.mark.slow),
    ],
)
def test_optimizer_checkpoint_continues_in_another_layout(
    resumed: dict[str, list[str]],
    one_rank: dict[str, Any],
    exact: dict[str, Any],
    two_ranks: list[dict[str, Any]],
    checkpoints: Path,
) -> None:
    ports = [free_port() for others in resumed.values() for _ in others]
    arguments = (resumed, ports, checkpoints)
    for saved, name, losses in run_distributed(resume_in_other_layouts, 2, *arguments)[0]:
        assert len(losses) == STEPS - STEPS // 2
        expected = (one_rank["losses"], exact["losses"])
        assert_same_training(losses, *expected, TOKENS, f"{saved} -> {name}")


def test_unsplittable_optimizer_error_names_the_remedy(
    two_ranks: list[dict[str, Any]], checkpoints: Path
) -> None:
    message = r"step_000002 was saved with expert or tensor parallelism.*parallel.expert or parallel.tensor above 1"
    with pytest.raises(CheckpointError, match=message):
        train(ParallelConfig(), 0, free_port(), resume=latest_checkpoint(checkpoints / "expert"))


# GPT-OSS's shape on GPUs; all experts are active, because a different routing would hide errors
SHAPED = GptOssModelConfig(
    num_layers=4, num_experts=8, experts_per_token=8, hidden_size=512, intermediate_size=512, num_attention_heads=16,
    num_key_value_heads=2, vocab_size=1024,
)  # fmt: skip
STEPS_ON_GPUS = 6
LAYOUTS_ON_GPUS: dict[int, dict[str, dict[str, int]]] = {
    2: {
        "data": {},
        "expert": {"expert": 2},
        "pipeline": {"pipeline": 2},
        "tensor+sequence+expert": {"tensor": 2, "expert": 2},
        "context+expert": {"context": 2, "expert": 2},
    },
    4: {
        "data": {},
        "expert": {"expert": 4},
        "expert 2, data": {"expert": 2},
        "pipeline+expert": {"pipeline": 2, "expert": 2},
        "tensor+sequence+expert": {"tensor": 2, "expert": 4},
        "context+expert": {"context": 4, "expert": 4},
    },
}
RESUMED_ON_GPUS = {
    2: [("data", "pipeline"), ("expert", "tensor+sequence+expert"), ("expert", "expert")],
    4: [
        ("expert", "expert 2, data"),
        ("expert 2, data", "tensor+sequence+expert"),
        ("expert", "expert"),
    ],
}


def train_on_a_gpu(
    parallel: ParallelConfig, rank: int, port: int, *, save: Path | None, resume: Path | None
) -> Any:
    """Return losses and gradient norms in bf16."""
    os.environ["LOCAL_RANK"] = str(rank)
    if rank == 0:  # pytest -s shows the progress
        print(f"{time.strftime('%X')} {parallel.world_size} GPUs, {parallel.sizes}", flush=True)
    distributed.initialize(parallel, rank, port=port)
    try:
        model = build_model(SHAPED, parallel, torch.bfloat16)
        load_hf_weights(model, SHAPED, hf_model(SHAPED, std=0.05).state_dict().__getitem__)
        trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1.0))
        samples = documents([300, 50, 180, 260, 110, 20, 230, 90], seed=3, vocab_size=1024)
        batches = local_batches(samples, 320, parallel)
        if resume:
            load_checkpoint(resume, trainer)

        steps = []
        for step in range(STEPS_ON_GPUS // 2 if resume else 0, STEPS_ON_GPUS):
            if save and step == STEPS_ON_GPUS // 2:
                save_checkpoint(save, trainer, step, {})
            steps.append(
                trainer.train_step(batches, mean_cross_entropy(1232), 1e-4)
            )  # stops before the samples are memorized
        return [step.sums["loss"] for step in steps], [step.grad_norm for step in steps]
    finally:
        distributed.shutdown()


def train_on_gpus(rank: int, gpus: int, ports: list[int], checkpoints: Path) -> dict[str, Any]:
    results = {}
    port = iter(ports)
    for name, layout in LAYOUTS_ON_GPUS[gpus].items():
        parallel = ParallelConfig(world_size=gpus, **layout)
        results[name] = train_on_a_gpu(
            parallel, rank, next(port), save=checkpoints / name, resume=None
        )
    for saved, name in RESUMED_ON_GPUS[gpus]:
        parallel = ParallelConfig(world_size=gpus, **LAYOUTS_ON_GPUS[gpus][name])
        checkpoint = latest_checkpoint(checkpoints / saved)
        results[f"{saved} -> {name}"] = train_on_a_gpu(
            parallel, rank, next(port), save=None, resume=checkpoint
        )
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", [2, 4])
def test_several_gpus_train_like_one_and_change_layouts(gpus: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"fewer than {gpus} GPUs")
    losses, norms = train_on_a_gpu(ParallelConfig(), 0, free_port(), save=None, resume=None)
    assert losses[-1] < losses[0] - 0.2
    ports = [free_port() for _ in range(len(LAYOUTS_ON_GPUS[gpus]) + len(RESUMED_ON_GPUS[gpus]))]
    found = run_distributed(train_on_gpus, gpus, gpus, ports, tmp_path)[0]
    for name, (got, got_norms) in found.items():
        print(name, [f"{loss:.5f}" for loss in got], [f"{norm:.4f}" for norm in got_norms])
    for name, (got, got_norms) in found.items():
        assert got == pytest.approx(losses[-len(got) :], rel=3e-3), name
        assert got_norms == pytest.approx(norms[-len(got) :], rel=3e-2), name
