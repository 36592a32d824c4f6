"""Routing replay and the value model, on one process and on every two-rank layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from converters.live import load_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.critic import ValueTrainer, make_critic
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import PackedBatch, Sample, pack, unpack
from megatron_gptoss.routing_replay import LayerReplay, RoutingReplay
from megatron_gptoss.scorer import alignment, data_parallel_slice
from megatron_gptoss.trainer import LossOutput, PolicyTrainer
from tests.distributed import free_port, run_distributed
from tests.megatron_gptoss.reference import TINY, documents, hf_model, mean_cross_entropy

LAYOUTS = {
    "data": {},
    "expert": {"expert": 2},
    "pipeline": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "virtual_pipeline": 2},
    "uneven pipeline": {"pipeline": 2, "last_stage_layers": 1},
    "tensor+sequence": {"tensor": 2},
    "context": {"context": 2},
}


def with_random_routes(samples: list[Sample]) -> list[Sample]:
    """Four different experts for every token and layer, but for the last rows, where the
    trainer chooses."""
    rng = np.random.default_rng(0)
    for sample in samples:
        shape = (len(sample.token_ids) - 1, TINY.num_layers, TINY.num_experts)
        routes = rng.random(shape).argsort(axis=-1)[..., :4].astype(np.int16)
        routes[-1] = -1
        sample.routed_experts = routes
    return samples


SAMPLES = with_random_routes(documents([30, 5, 18, 26, 11, 2, 23, 9], seed=3))
TOKENS = sum(len(sample.token_ids) - 1 for sample in SAMPLES)


def square_error(values: torch.Tensor, batch: PackedBatch) -> LossOutput:
    on = batch.loss_mask > 0
    loss = (
        torch.where(on, (values - batch.labels.to(values.dtype) / 64).square(), 0.0).sum() / TOKENS
    )
    return LossOutput(loss, {"loss": loss, "tokens": on.sum()})


def recorded_routes(
    trainer: PolicyTrainer, batches: list[PackedBatch], parallel: ParallelConfig
) -> dict[int, Any]:
    assert trainer.replay is not None
    trainer.replay.start_recording()
    trainer.score(batches)
    rows: dict[int, Any] = {}
    for routes, batch in zip(trainer.replay.recorded(), batches, strict=True):
        if parallel.context > 1:
            routes = routes[batch.context_layout_over(parallel.context).inverse]
        rows |= {i: np.array(row[1:]) for i, row in unpack(routes.flatten(1), batch).items()}
    return rows


def train(parallel: ParallelConfig, rank: int, port: int) -> dict[str, Any]:
    distributed.initialize(parallel, rank, port=port)
    try:
        model = build_model(TINY, parallel, torch.float32)
        load_hf_weights(model, TINY, hf_model(std=0.1).state_dict().__getitem__)
        trainer = PolicyTrainer(model, OptimizerConfig())
        trainer.replay = RoutingReplay(model)
        limit = 32 if parallel.virtual_pipeline > 1 else 64
        multiple = parallel.micro_batch_multiple
        batches = list(
            data_parallel_slice(pack(SAMPLES, limit, parallel.data, alignment(), multiple=multiple))
        )
        steps = [trainer.train_step(batches, mean_cross_entropy(TOKENS), 3e-3) for _ in range(3)]
        recorded = recorded_routes(trainer, batches, parallel)

        other = build_model(TINY, parallel, torch.float32)
        load_hf_weights(other, TINY, hf_model(std=0.1).state_dict().__getitem__)
        critic = ValueTrainer(make_critic(other), OptimizerConfig())
        fitted = [critic.train_step(batches, square_error, 3e-3) for _ in range(4)]
        return {
            "losses": [step.sums["loss"] for step in steps],
            "norms": [step.grad_norm for step in steps],
            "agreement": [
                (step.sums["routes_agreeing"], step.sums["routes_compared"]) for step in steps
            ],
            "recorded": recorded,
            "critic": [(step.sums["loss"], step.grad_norm) for step in fitted],
            "values": {
                tuple(batch.labels.tolist()): row.tolist()
                for batch, row in zip(batches, critic.score(batches), strict=True)
            },
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
def test_replay_under_a_layout_trains_as_in_one_process(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    for rank in two_ranks:
        assert rank[layout]["losses"] == pytest.approx(one_rank["losses"], rel=1e-5)
        assert rank[layout]["norms"] == pytest.approx(one_rank["norms"], rel=2e-4)
        for got, want in zip(rank[layout]["agreement"], one_rank["agreement"], strict=True):
            assert got[1] == want[1] == TINY.num_layers * (TOKENS - len(SAMPLES))
            assert got[0] == pytest.approx(want[0], abs=3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recorded_routes_are_those_that_were_given(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    for rank in two_ranks:
        for i, rows in rank[layout]["recorded"].items():
            given = SAMPLES[i].routed_experts
            assert given is not None
            assert np.array_equal(rows[:-1].reshape(given[:-1].shape), given[:-1])
            assert (rows[-1] >= 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_critic_under_a_layout_learns_as_in_one_process(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    want = one_rank["critic"]
    assert want[-1][0] < want[0][0]
    for rank in two_ranks:
        for got, expected in zip(rank[layout]["critic"], want, strict=True):
            assert got == pytest.approx(expected, rel=2e-3)


class Router:
    """What LayerReplay looks at."""

    def __init__(self, recompute: bool) -> None:
        self.training = True
        granularity, modules = ("selective", ["moe"]) if recompute else (None, None)
        self.config = type(
            "Config", (), {"recompute_granularity": granularity, "recompute_modules": modules}
        )()


def test_a_recomputed_layer_gets_the_routes_of_its_micro_batch_again() -> None:
    layer = LayerReplay(Router(recompute=True), 0)
    first = torch.tensor([[0, 1]])
    second = torch.tensor([[2, 3]])
    layer.pending.extend([first, second])
    layer.recorded = []
    own = torch.tensor([[1, 0]])
    with torch.no_grad():
        assert torch.equal(layer.replace_routes(own, layer.take()), first)
        assert layer.take() is second  # a pipeline is a micro-batch ahead
    again = layer.take()
    assert again is first
    assert torch.equal(layer.replace_routes(own, again), first)
    assert layer.take() is second
    assert (layer.agreeing, layer.compared, len(layer.recorded)) == (
        1,
        1,
        1,
    )  # once, not again in recomputation
    assert not layer.pending
    assert not layer.pending_recompute


def test_a_route_is_used_once_and_none_is_left(one_rank: dict[str, Any]) -> None:
    layer = LayerReplay(Router(recompute=False), 3)
    layer.pending.append(None)
    layer.take()
    with pytest.raises(RuntimeError, match="layer 3 routes a micro-batch twice"):
        layer.take()
    replay = RoutingReplay(torch.nn.Module())
    replay.layers = [layer]
    replay.check_consumed()
    layer.pending.append(None)
    with pytest.raises(RuntimeError, match="left routes of 1 micro-batches unused"):
        replay.check_consumed()


def test_the_gradient_goes_through_the_gates_of_the_given_experts() -> None:
    distributed.initialize(ParallelConfig(), 0, port=free_port())
    try:
        model = build_model(TINY, ParallelConfig(), torch.float32)
        RoutingReplay(model)
        router = model.decoder.layers[0].mlp.router
        scores = torch.randn(3, TINY.num_experts, requires_grad=True)
        given = torch.tensor([[7, 0, 3, 1], [2, 5, 6, 4], [-1, -1, -1, -1]])
        router.replay.pending.append(given)

        probs, chosen = router.routing(scores)
        for token in range(2):
            inside = scores[token, given[token]].softmax(dim=-1)
            torch.testing.assert_close(probs[token, given[token]], inside)
            assert set(chosen[token].nonzero()[:, 0].tolist()) == set(given[token].tolist())
        assert set(chosen[2].nonzero()[:, 0].tolist()) == set(scores[2].topk(4).indices.tolist())

        probs[0, 7].backward()
        assert scores.grad[0, given[0]].abs().min() > 0
        outside = [e for e in range(TINY.num_experts) if e not in given[0]]
        assert not scores.grad[0, outside].any()
    finally:
        distributed.shutdown()
