"""Pipeline stages without trained weights are rejected. All other frozen layouts train."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch

from converters.model_weights import load_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.checkpoint.loader import load_checkpoint
from megatron_gptoss.config import AdapterConfig, OptimizerConfig, ParallelConfig
from megatron_gptoss.config.adapter import PART_OF_TARGET
from megatron_gptoss.layers.adapters import initialize_adapters
from megatron_gptoss.model import build_model, freeze
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.adapted import MODEL, base_weights
from tests.support.megatron_gptoss.reference import (
    documents,
    local_batches,
    mean_cross_entropy,
    save_checkpoint,
)

FOUR_LAYERS = MODEL.model_copy(update={"num_layers": 4})
SAMPLES = documents([30, 5, 18, 26, 11, 2, 23, 9], seed=3)
TOKENS = int(SAMPLES.loss_tokens.sum())
PARTS = ("attention", "experts")
LAYOUTS: dict[str, tuple[dict[str, int], tuple[str, ...], tuple[str, ...] | None]] = {
    # parallel layout, frozen parts, adapter targets
    "two stages": ({"pipeline": 2}, PARTS, None),
    # rank 0 has layers 1 and 3, so its second chunk has no trained weights
    "four chunks": ({"pipeline": 2, "virtual_pipeline": 2}, PARTS, None),
    "ends": ({"pipeline": 2}, (), ("embedding", "head")),
    "ends and frozen layers": ({"pipeline": 2}, ("attention",), ("q", "embedding", "head")),
}


def build_stage(
    parallel: ParallelConfig, frozen: tuple[str, ...], targets: tuple[str, ...] | None
) -> torch.nn.Module:
    adapter = None if targets is None else AdapterConfig(rank=4, targets=targets)
    model = build_model(FOUR_LAYERS, parallel, adapter=adapter)
    load_hf_weights(model, FOUR_LAYERS, base_weights(FOUR_LAYERS).__getitem__)
    if adapter is not None:
        initialize_adapters(model, seed=0)
    freeze(model, frozen)
    return model


def train(name: str, rank: int, world_size: int, port: int, root: Path) -> list[float]:
    """Train 4 steps, 2 of them after a restart from a checkpoint. Return losses and norms."""
    sizes, frozen, targets = LAYOUTS[name]
    layout = sizes if world_size > 1 else {}
    parallel = ParallelConfig(world_size=world_size, **layout)
    distributed.initialize(parallel, rank, port=port)
    try:
        results = []
        batches = local_batches(SAMPLES, 64, parallel)
        trainer = PolicyTrainer(build_stage(parallel, frozen, targets), OptimizerConfig())
        for step in range(4):
            if step == 2:
                saved = save_checkpoint(root / name / str(world_size), trainer, step, {})
                trainer = PolicyTrainer(build_stage(parallel, frozen, targets), OptimizerConfig())
                load_checkpoint(saved, trainer)
            statistics = trainer.train_step(batches, mean_cross_entropy(TOKENS), 1e-2)
            results += [statistics.sums["loss"], statistics.grad_norm]
        return results
    finally:
        distributed.shutdown()


def train_on_two_ranks(rank: int, ports: list[int], root: Path) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    return {
        name: train(name, rank, 2, port, root) for name, port in zip(LAYOUTS, ports, strict=True)
    }


def test_partly_frozen_stages_train_like_one_process(tmp_path: Path) -> None:
    two_ranks = run_distributed(train_on_two_ranks, 2, [free_port() for _ in LAYOUTS], tmp_path)
    for name in LAYOUTS:
        expected = train(name, 0, 1, free_port(), tmp_path)
        assert expected[0] > expected[-2], name
        for rank in two_ranks:
            assert rank[name] == pytest.approx(expected, rel=2e-4), name


def build_trainer(rank: int, port: int) -> str:
    torch.set_num_threads(1)
    parallel = ParallelConfig(world_size=4, pipeline=4)
    distributed.initialize(parallel, rank, port=port)
    try:
        PolicyTrainer(build_stage(parallel, PARTS, None), OptimizerConfig())
    except ValueError as error:
        return str(error)
    finally:
        distributed.shutdown()
    return ""


def test_trainer_rejects_stages_without_trained_weights() -> None:
    """Callers of the library may set ``requires_grad`` directly. All ranks raise the same error."""
    messages = run_distributed(build_trainer, 4, free_port())
    assert messages == [messages[0]] * 4
    assert messages[0].startswith("model: no parameter of pipeline stages 1, 2 requires a gradient")


@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("frozen", [(), ("attention",), ("experts",), PARTS])
def test_layouts_are_rejected_if_a_stage_trains_nothing(
    pipeline: int, frozen: tuple[str, ...]
) -> None:
    """The test tries all sets of up to three targets, and full training."""
    parallel = ParallelConfig(world_size=pipeline, pipeline=pipeline)
    adapters = [
        AdapterConfig(rank=4, targets=targets)
        for count in (1, 2, 3)
        for targets in combinations(PART_OF_TARGET, count)
    ]
    for adapter in [None, *adapters]:
        targets = PART_OF_TARGET if adapter is None else adapter.targets
        trained = {PART_OF_TARGET[target] for target in targets} - set(frozen)
        stages = [
            bool(trained & set(PARTS))
            or (stage == 0 and "embedding" in trained)
            or (stage == pipeline - 1 and "head" in trained)
            for stage in range(pipeline)
        ]
        if all(stages):
            parallel.check_layout(FOUR_LAYERS, adapter, frozen)
            continue
        with pytest.raises(ValueError, match=r"nothing is trained|would have nothing to train"):
            parallel.check_layout(FOUR_LAYERS, adapter, frozen)


def test_rejected_layouts_name_their_keys_and_a_remedy() -> None:
    four = ParallelConfig(world_size=4, pipeline=4)
    message = (
        r"ablation.freeze \(attention, experts\): pipeline stages 1, 2 would have nothing to train "
        r"\(parallel.pipeline 4\). Set parallel.pipeline to 2, or train another part"
    )
    with pytest.raises(ValueError, match=message):
        four.check_layout(FOUR_LAYERS, None, PARTS)
    message = (
        r"adapter.targets \(q, head\) with ablation.freeze \(attention\): pipeline stages 0, 1, 2 "
        r".* Set parallel.pipeline to 1, or train another part of the layers"
    )
    with pytest.raises(ValueError, match=message):
        four.check_layout(FOUR_LAYERS, AdapterConfig(targets=("q", "head")), ("attention",))
