"""Gradient, value and limits of the load-balancing loss, against transformers' router logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from converters.model_weights import load_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.layers.router import GptOssRouter
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.routing_replay import RoutingReplay
from megatron_gptoss.step_results import LossOutput, StepStatistics
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.layouts import LAYOUTS
from tests.support.megatron_gptoss.reference import (
    TINY,
    documents,
    gradients,
    hf_model,
    local_batches,
    mean_cross_entropy,
)

# The last token of a document is not an input, so rows have 128 or 64 tokens and no padding.
SAMPLES = documents([33, 33, 17, 17, 17, 17])
COEFFICIENT = 0.3


def no_loss(log_probs: Tensor, entropy: Tensor, batch: PackedBatch) -> LossOutput:
    """Return a loss whose gradient is 0."""
    return LossOutput(0 * log_probs.sum(), {"loss": 0 * log_probs.sum()})


def build_trainer(parallel: ParallelConfig) -> PolicyTrainer:
    model = build_model(TINY, parallel)
    load_hf_weights(model, TINY, hf_model(std=0.1).state_dict().__getitem__)
    # Without clipping, so that gradients of two losses can be subtracted.
    return PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))


def balance(parallel: ParallelConfig, rank: int, port: int) -> dict[str, Any]:
    """Take a step whose only loss is the load-balancing loss."""
    distributed.initialize(parallel, rank, port=port)
    try:
        trainer = build_trainer(parallel)
        batches = local_batches(SAMPLES, 64 if parallel.virtual_pipeline > 1 else 128, parallel)
        assert all((batch.sample_ids >= 0).all() for batch in batches)
        statistics = trainer.train_step(batches, no_loss, 0.0, load_balancing=COEFFICIENT)
        return {
            "rows": [batch.sample_ids.unique().tolist() for batch in batches],
            "loss": statistics.load_balancing_loss,
            "gradients": gradients(trainer, TINY),
        }
    finally:
        distributed.shutdown()


def balance_every_layout(rank: int, ports: list[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        name: balance(ParallelConfig(world_size=2, **layout), rank, port)
        for (name, layout), port in zip(LAYOUTS.items(), ports, strict=True)
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_distributed(balance_every_layout, 2, [free_port() for _ in LAYOUTS])


def expected(rows: list[list[int]]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of rows of documents and its gradients, by transformers and autograd."""
    model = hf_model(std=0.1)
    logits: list[list[Tensor]] = [[] for _ in range(TINY.num_layers)]
    for collected, layer in zip(logits, model.model.layers, strict=True):
        layer.mlp.router.register_forward_hook(
            lambda module, inputs, output, collected=collected: collected.append(output[0])
        )
    loss = torch.zeros(())
    tokens = sum(int(SAMPLES.lengths[i]) - 1 for row in rows for i in row)
    for row in rows:
        for collected in logits:
            collected.clear()
        for i in row:
            model(torch.tensor(SAMPLES.take([i]).token_ids[None, :-1]).long())
        for collected in logits:
            of_row = torch.cat(collected)
            chosen = of_row.topk(TINY.experts_per_token).indices.flatten()
            share = chosen.bincount(minlength=TINY.num_experts) / len(chosen)
            probability = of_row.softmax(-1).mean(0)
            balance = TINY.num_experts * (share * probability).sum()
            loss = loss + balance * len(of_row) / tokens
    (COEFFICIENT * loss).backward()
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return loss.item() / TINY.num_layers, found


def check(result: dict[str, Any], rows: list[list[int]]) -> None:
    loss, wanted = expected(rows)
    assert loss > 1.02
    assert result["loss"] == pytest.approx(loss, abs=1e-5)
    assert wanted["model.layers.0.mlp.router.weight"].abs().max() > 1e-4
    for name, tensor in wanted.items():
        scale = tensor.abs().max().item()
        torch.testing.assert_close(
            result["gradients"][name], tensor, atol=2e-3 * scale + 1e-8, rtol=0, msg=name
        )


def test_gradient_equals_autograd_of_the_switch_loss() -> None:
    result = balance(ParallelConfig(), 0, free_port())
    check(result, result["rows"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_balance_like_one_process(layout: str, two_ranks: list[dict[str, Any]]) -> None:
    results = [rank[layout] for rank in two_ranks]
    rows = results[0]["rows"]
    if LAYOUTS[layout].keys() <= {"expert"}:  # ranks have different rows
        rows = rows + results[1]["rows"]
    assert sorted(i for row in rows for i in row) == list(range(len(SAMPLES)))
    assert results[0]["loss"] == results[1]["loss"]
    check(results[0], rows)


def step(trainer: PolicyTrainer, **options: Any) -> StepStatistics:
    return trainer.train_step([build_batch(SAMPLES)], mean_cross_entropy(128), 0.0, **options)


@pytest.mark.usefixtures("process_groups")
def test_balancing_adds_to_the_gradient_and_not_to_the_loss() -> None:
    trainer = build_trainer(ParallelConfig())
    plain = step(trainer)
    without = gradients(trainer, TINY)
    balanced = step(trainer, load_balancing=COEFFICIENT)
    both = gradients(trainer, TINY)

    assert balanced.sums == plain.sums
    assert balanced.expert_loads == plain.expert_loads
    assert plain.load_balancing_loss is None and balanced.load_balancing_loss > 1
    _, added = expected([list(range(len(SAMPLES)))])
    name = "model.layers.3.mlp.router.weight"
    torch.testing.assert_close(both[name] - without[name], added[name], atol=1e-5, rtol=1e-3)

    # The next step has no such loss unless it is asked for.
    assert step(trainer).load_balancing_loss is None
    assert all(
        torch.equal(tensor, without[name]) for name, tensor in gradients(trainer, TINY).items()
    )


@pytest.mark.usefixtures("process_groups")
def test_balancing_loss_makes_loads_even() -> None:
    trainer = build_trainer(ParallelConfig())
    first = trainer.train_step([build_batch(SAMPLES)], no_loss, 3e-3, load_balancing=COEFFICIENT)
    for _ in range(30):
        last = trainer.train_step([build_batch(SAMPLES)], no_loss, 3e-3, load_balancing=COEFFICIENT)
    assert first.expert_loads.smallest < 0.5 and first.expert_loads.largest > 1.5
    assert last.expert_loads.smallest > 0.7 and last.expert_loads.largest < 1.45
    assert last.load_balancing_loss < first.load_balancing_loss


@pytest.mark.usefixtures("process_groups")
def test_prescribed_routes_are_not_balanced() -> None:
    trainer = build_trainer(ParallelConfig())
    trainer.replay = RoutingReplay(trainer.module)
    batch = build_batch(SAMPLES)
    assert step(trainer, load_balancing=COEFFICIENT).load_balancing_loss > 1
    experts = torch.arange(TINY.experts_per_token).expand(128, TINY.num_layers, -1)
    prescribed = replace(batch, routed_experts=experts.to(torch.uint8).contiguous())
    with pytest.raises(ValueError, match=r"load_balancing \(0.3\): the routes .* are prescribed"):
        trainer.train_step([prescribed], no_loss, 0.0, load_balancing=COEFFICIENT)
    trainer.train_step([prescribed], no_loss, 0.0)
    routers = [module for module in trainer.module.modules() if isinstance(module, GptOssRouter)]
    assert all(router.balancing_weight is None for router in routers)
