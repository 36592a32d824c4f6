"""Two gloo ranks train adapters like one process under every kind of parallelism."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from converters.adapter_checkpoint import CheckpointAdapters
from converters.adapter_weights import load_adapter
from converters.model_weights import export_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.checkpoint.base_digest import base_digest
from megatron_gptoss.checkpoint.loader import load_checkpoint
from megatron_gptoss.config import OptimizerConfig, ParallelConfig, Quantization
from megatron_gptoss.layers.adapters import initialize_adapters
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.adapted import ADAPTER, MODEL, adapted_model, single_adapters
from tests.support.megatron_gptoss.layouts import layout_cases, selected_layouts
from tests.support.megatron_gptoss.reference import (
    documents,
    float64_training,
    local_batches,
    mean_cross_entropy,
    save_checkpoint,
)
from tests.support.tolerances import assert_same_training, assert_within, rounding_error

SAMPLES = documents([30, 5, 18, 26, 11, 2, 23, 9], seed=3)
TOKENS = int(SAMPLES.loss_tokens.sum())
STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "expert": {"expert": 2},
    "expert, four bits": {"expert": 2},
    "pipeline": {"pipeline": 2},
    "tensor": {"tensor": 2},
    "tensor, four bits": {"tensor": 2},
    "tensor+expert": {"tensor": 2, "expert": 2},
    "tensor+expert, grouped": {"tensor": 2, "expert": 2},
    "context": {"context": 2},
    "tensor+expert, grouped, unmerged": {"tensor": 2, "expert": 2},
    "pipeline, unmerged": {"pipeline": 2},
}
UNMERGED = {"tensor+expert, grouped, unmerged", "pipeline, unmerged"}
"""Layouts whose experts are not merged. In fp32 they are the same model."""
MXFP4 = {"expert, four bits", "tensor, four bits", "tensor+expert, grouped", *UNMERGED}
"""Layouts whose base is stored in MXFP4."""
Gradients = dict[str, torch.Tensor]


def local_gradients(trainer: PolicyTrainer) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Return (gradient of the last step, split dimension) by factor name."""
    gradients = {}
    for name, adapter in single_adapters(trainer.module):
        for factor, gradient in adapter.gradients.items():
            split = adapter.whole.tensor_parallel_dims.get(factor)
            gradients[f"{name}.{factor}"] = (gradient.clone(), split)
    return gradients


def train(
    parallel: ParallelConfig,
    rank: int,
    port: int,
    grouped: bool = False,
    quantization: Quantization | None = None,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    merge_experts: bool = True,
) -> dict[str, Any]:
    distributed.initialize(parallel, rank, port=port)
    try:
        # expert GEMMs as on GPUs
        adapter = ADAPTER.model_copy(update={"merge_experts": merge_experts})
        model = adapted_model(
            parallel, adapter, dtype, quantization=quantization, moe_grouped_gemm=grouped
        )
        trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))
        batches = local_batches(SAMPLES, 64, parallel)
        statistics = []
        gradients = []
        for _ in range(steps):
            statistics.append(trainer.train_step(batches, mean_cross_entropy(TOKENS), 3e-3))
            gradients.append(local_gradients(trainer))

        exported = export_hf_weights(trainer.module, MODEL)
        return {
            "losses": [step.sums["loss"] for step in statistics],
            "norms": [step.grad_norm for step in statistics],
            "gradients": gradients,
            "tensor rank": parallel_state.get_tensor_model_parallel_rank(),
            "digest": base_digest(trainer.module),
            "weights": {name: tensor.clone() for name, tensor in exported},
        }
    finally:
        distributed.shutdown()


def train_every_layout(rank: int, ports: dict[str, int]) -> dict[str, Any]:
    """Train in the layouts that have a port."""
    torch.set_num_threads(1)
    return {
        name: train(
            ParallelConfig(world_size=2, **LAYOUTS[name]),
            rank,
            port,
            grouped="grouped" in name,
            quantization="mxfp4" if name in MXFP4 else None,
            merge_experts=name not in UNMERGED,
        )
        for name, port in ports.items()
    }


CASES = layout_cases(LAYOUTS, slow=["expert, four bits", "tensor", "tensor+expert"])


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    ports = {name: free_port() for name in selected_layouts(request)}
    return run_distributed(train_every_layout, 2, ports)


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return train(ParallelConfig(), 0, free_port())


@pytest.fixture(scope="module")
def exact() -> dict[str, Any]:
    """Train one process in float64."""
    with float64_training():
        return train(ParallelConfig(), 0, free_port(), dtype=torch.float64)


@pytest.mark.parametrize("layout", CASES)
def test_losses_and_norms_equal_those_of_one_process(
    layout: str,
    one_rank: dict[str, Any],
    exact: dict[str, Any],
    two_ranks: list[dict[str, Any]],
) -> None:
    parameters = sum(gradient.numel() for gradient, _ in one_rank["gradients"][0].values())
    for rank in two_ranks:
        for name, terms in (("losses", TOKENS), ("norms", parameters)):
            assert_same_training(rank[layout][name], one_rank[name], exact[name], terms, name)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("layout", CASES)
def test_every_gradient_equals_that_of_one_process(
    layout: str,
    step: int,
    one_rank: dict[str, Any],
    exact: dict[str, Any],
    two_ranks: list[dict[str, Any]],
) -> None:
    expected = one_rank["gradients"][step]
    seen = set()
    for rank in two_ranks:
        tensor_ranks = LAYOUTS[layout].get("tensor", 1)
        for name, (gradient, split) in rank[layout]["gradients"][step].items():
            wanted, _ = expected[name]
            scale = wanted.abs().max().item()
            allowed = rounding_error(wanted, exact["gradients"][step][name][0])
            assert 0 < allowed < 1e-3 * scale, name
            if step > 0:
                # Adam's first update depends mainly on the sign of a gradient. Rounding flips signs
                # of gradients near 0, and differently in each layout.
                allowed = 2e-3 * scale
            if split is not None and tensor_ranks > 1:
                wanted = wanted.chunk(tensor_ranks, split)[rank[layout]["tensor rank"]]
            assert_within(gradient, wanted, allowed, name)
            seen.add(name)
    assert seen == expected.keys()


@pytest.mark.parametrize("layout", CASES)
def test_merged_weights_equal_those_of_one_process(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    exported = two_ranks[0][layout]["weights"]
    assert exported.keys() == one_rank["weights"].keys()
    for name, wanted in one_rank["weights"].items():
        torch.testing.assert_close(exported[name], wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("layout", CASES)
def test_the_digest_of_the_base_is_that_of_one_process(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    assert {rank[layout]["digest"] for rank in two_ranks} == {one_rank["digest"]}


# -- checkpoints in other layouts ----------------------------------------------------------------

RELAY: list[tuple[ParallelConfig, Quantization | None]] = [
    (ParallelConfig(world_size=2, expert=2), "mxfp4"),
    (ParallelConfig(world_size=2, tensor=2), None),
    (ParallelConfig(world_size=2, tensor=2, expert=2), None),
    (ParallelConfig(world_size=2, expert=2), None),
]
"""Layouts of one run, with a change after every two steps, and formats of its base.

All layouts have a separate optimizer for experts.
"""


def run_relay(rank: int, ports: list[int], root: Path) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [
        run_leg(parallel, quantization, rank, port, root, leg)
        for leg, ((parallel, quantization), port) in enumerate(zip(RELAY, ports, strict=True))
    ]


def run_leg(
    parallel: ParallelConfig,
    quantization: Quantization | None,
    rank: int,
    port: int,
    root: Path,
    leg: int,
) -> dict[str, Any]:
    """Continue the run of the previous leg, take two steps and save."""
    distributed.initialize(parallel, rank, port=port)
    try:
        model = adapted_model(parallel, quantization=quantization)
        trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))
        if leg > 0:
            initialize_adapters(trainer.module, seed=7)
            load_checkpoint(root / f"step_{leg:06d}", trainer)
        loaded = merged(trainer)

        batches = local_batches(SAMPLES, 64, parallel)
        losses = [
            trainer.train_step(batches, mean_cross_entropy(TOKENS), 3e-3).sums["loss"]
            for _ in range(2)
        ]
        save_checkpoint(root, trainer, leg + 1, {})
        return {"loaded": loaded, "losses": losses, "saved": merged(trainer)}
    finally:
        distributed.shutdown()


def merged(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in export_hf_weights(trainer.module, MODEL)}


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    root = tmp_path_factory.mktemp("relay")
    [legs, _] = run_distributed(run_relay, 2, [free_port() for _ in RELAY], root)
    return legs, root


def test_every_layout_loads_the_adapters_that_another_saved(
    relay: tuple[list[dict[str, Any]], Path],
) -> None:
    legs, _ = relay
    for before, after in pairwise(legs):
        assert after["loaded"].keys() == before["saved"].keys()
        for name, tensor in before["saved"].items():
            assert torch.equal(after["loaded"][name], tensor), name


def test_run_with_layout_changes_equals_one_process(
    relay: tuple[list[dict[str, Any]], Path],
) -> None:
    legs, _ = relay
    losses = [loss for leg in legs for loss in leg["losses"]]
    expected = train(ParallelConfig(), 0, free_port(), steps=len(losses))["losses"]
    assert losses == pytest.approx(expected, rel=1e-4)


def test_saved_adapters_of_expert_parallel_ranks_are_combined(
    relay: tuple[list[dict[str, Any]], Path],
) -> None:
    legs, root = relay
    distributed.initialize(ParallelConfig(), port=free_port())
    try:
        model = adapted_model(ParallelConfig(), b_std=0.3)
        load_adapter(model, MODEL, CheckpointAdapters(root / f"step_{len(RELAY):06d}"))
        for name, tensor in export_hf_weights(model, MODEL):
            assert torch.equal(tensor, legs[-1]["saved"][name]), name
    finally:
        distributed.shutdown()
