"""Routing replay and the value model, on one process and on every two-rank layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from converters.model_weights import load_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.context_parallel.token_order import rank_tokens
from megatron_gptoss.critic import ValueTrainer, make_critic
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import PackedBatch, RecordedRoutes, build_batch, pack
from megatron_gptoss.routes import route_dtype, unknown_route
from megatron_gptoss.routing_replay import LayerReplay, RoutingReplay
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import LossOutput, StepStatistics
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.layouts import layout_cases, selected_layouts
from tests.support.megatron_gptoss.reference import (
    TINY,
    documents,
    hf_model,
    mean_cross_entropy,
    unpack,
)

LAYOUTS = {
    "data": {},
    "expert": {"expert": 2},
    "pipeline": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "virtual_pipeline": 2},
    "uneven pipeline": {"pipeline": 2, "last_stage_layers": 1},
    "tensor+sequence": {"tensor": 2},
    "context": {"context": 2},
}


def with_random_routes(samples: TrainingSamples, dtype: np.dtype) -> TrainingSamples:
    """Add four random experts for every token and layer. In the last rows the trainer chooses."""
    rng = np.random.default_rng(0)
    routes = []
    for length in samples.lengths:
        noise = rng.random((length - 1, TINY.num_layers, TINY.num_experts))
        row = np.ascontiguousarray(noise.argsort(axis=-1)[..., :4].astype(dtype))
        row[-1] = unknown_route(dtype)
        routes.append(row)
    return samples.with_routes(routes)


DOCUMENTS = documents([30, 5, 18, 26, 11, 2, 23, 9], seed=3)
SAMPLES = with_random_routes(DOCUMENTS, route_dtype(TINY.num_experts))
TOKENS = int(SAMPLES.loss_tokens.sum())
STEPS = 2
"""Each step replays its own routes, and the second one follows an update."""
ALIGN = 16
"""Multiple to which all rows are padded, so that every layout has padding."""

Routes = dict[tuple[int, int, int], tuple[int, ...]]
"""{(sequence, position, layer): sorted experts}"""


def micro_batches(samples: TrainingSamples, parallel: ParallelConfig) -> list[PackedBatch]:
    """Return this data-parallel rank's micro-batches, followed by some without a sequence."""
    limit = 32 if parallel.virtual_pipeline > 1 else 64
    multiple = parallel.micro_batch_multiple
    per_rank = pack(samples, limit, parallel.data, ALIGN, multiple=multiple)
    idle = [build_batch(samples, [], ALIGN)] * multiple
    return per_rank[parallel_state.get_data_parallel_rank()] + idle


def square_error(values: torch.Tensor, batch: PackedBatch) -> LossOutput:
    on = batch.loss_mask
    loss = (
        torch.where(on, (values - batch.labels.to(values.dtype) / 64).square(), 0.0).sum() / TOKENS
    )
    return LossOutput(loss, {"loss": loss, "tokens": on.sum()})


def policy(parallel: ParallelConfig) -> PolicyTrainer:
    model = build_model(TINY, parallel, torch.float32)
    load_hf_weights(model, TINY, hf_model(std=0.1).state_dict().__getitem__)
    trainer = PolicyTrainer(model, OptimizerConfig())
    trainer.replay = RoutingReplay(model)
    return trainer


def record(trainer: PolicyTrainer, batches: list[PackedBatch]) -> list[RecordedRoutes]:
    assert trainer.replay is not None
    trainer.replay.start_recording()
    trainer.score(batches)
    return trainer.replay.recorded()


def local_tokens(batch: PackedBatch, column: torch.Tensor) -> torch.Tensor:
    """Return the rows that this rank's routers process.

    These are the rank's part of the context, split again over tensor-parallel ranks.
    """
    size = parallel_state.get_context_parallel_world_size()
    if size > 1:
        layout = batch.context_layout_over(size)
        column = column[rank_tokens(layout, parallel_state.get_context_parallel_rank())]
    shares = column.chunk(parallel_state.get_tensor_model_parallel_world_size())
    return shares[parallel_state.get_tensor_model_parallel_rank()]


def by_token(
    trainer: PolicyTrainer, batches: list[PackedBatch], recorded: list[RecordedRoutes]
) -> Routes:
    """Return the experts of every token on this rank, without padding."""
    assert trainer.replay is not None
    routes: Routes = {}
    for batch, micro_batch in zip(batches, recorded, strict=True):
        numbers = local_tokens(batch, batch.sample_ids).tolist()
        positions = local_tokens(batch, batch.position_ids).tolist()
        for replay, layer in zip(trainer.replay.layers, micro_batch.layers, strict=True):
            assert layer.dtype == torch.int16
            experts = layer.sort(dim=-1).values.tolist()
            for number, position, chosen in zip(numbers, positions, experts, strict=True):
                if number >= 0:
                    routes[number, position, replay.layer] = tuple(chosen)
    return routes


def disturb_routers(trainer: PolicyTrainer) -> None:
    """Change the routers like a policy update, equally in every layout."""
    for chunk in trainer.chunks:
        for layer in chunk.decoder.layers:
            generator = torch.Generator().manual_seed(layer.layer_number)
            weight = layer.mlp.router.weight.data
            weight += 0.1 * torch.randn(weight.shape, generator=generator)


def select_statistics(steps: list[StepStatistics]) -> dict[str, Any]:
    return {
        "losses": [step.sums["loss"] for step in steps],
        "norms": [step.grad_norm for step in steps],
        "agreeing": [step.sums["routes_agreeing"] for step in steps],
        "compared": [step.sums["routes_compared"] for step in steps],
    }


def replay_prescribed_routes(parallel: ParallelConfig) -> dict[str, Any]:
    """Train with the routes of the samples, which come from an engine (R3)."""
    trainer = policy(parallel)
    batches = micro_batches(SAMPLES, parallel)
    steps = [trainer.train_step(batches, mean_cross_entropy(TOKENS), 3e-3) for _ in range(STEPS)]
    recorded = record(trainer, batches)
    return select_statistics(steps) | {"recorded": by_token(trainer, batches, recorded)}


def replay_recorded_routes(parallel: ParallelConfig) -> dict[str, Any]:
    """Train with the routes that this rank's routers chose before the policy changed (R2)."""
    trainer = policy(parallel)
    assert trainer.replay is not None
    batches = micro_batches(DOCUMENTS, parallel)
    recorded = record(trainer, batches)
    replaying = [
        replace(batch, recorded_routes=routes)
        for batch, routes in zip(batches, recorded, strict=True)
    ]
    disturb_routers(trainer)

    steps = []
    differing = padding = padding_routed_anew = 0
    for _ in range(STEPS):
        trainer.replay.start_recording()
        steps.append(trainer.train_step(replaying, mean_cross_entropy(TOKENS), 3e-3))
        used = trainer.replay.recorded()
        for batch, before, now in zip(batches, recorded, used, strict=True):
            is_real = local_tokens(batch, batch.sample_ids) >= 0
            for wanted, found in zip(before.layers, now.layers, strict=True):
                is_other = (wanted != found).any(dim=-1)
                differing += int((is_other & is_real).sum())
                padding += int((~is_real).sum())
                padding_routed_anew += int((is_other & ~is_real).sum())

    return select_statistics(steps) | {
        "recorded": by_token(trainer, batches, recorded),
        "differing": differing,
        "padding": padding,
        "padding_routed_anew": padding_routed_anew,
        "free": by_token(trainer, batches, record(trainer, batches)),
    }


def train_critic(parallel: ParallelConfig) -> dict[str, Any]:
    other = build_model(TINY, parallel, torch.float32)
    load_hf_weights(other, TINY, hf_model(std=0.1).state_dict().__getitem__)
    critic = ValueTrainer(make_critic(other), OptimizerConfig())
    batches = micro_batches(DOCUMENTS, parallel)
    steps = [critic.train_step(batches, square_error, 3e-3) for _ in range(STEPS)]

    values: dict[int, np.ndarray] = {}
    for batch, row in zip(batches, critic.score(batches), strict=True):
        values |= unpack(row, batch)
    return {
        "steps": [(step.sums["loss"], step.grad_norm) for step in steps],
        "values": values,
    }


def train(parallel: ParallelConfig, rank: int, port: int) -> dict[str, Any]:
    distributed.initialize(parallel, rank, port=port)
    try:
        return {
            "R3": replay_prescribed_routes(parallel),
            "R2": replay_recorded_routes(parallel),
            "critic": train_critic(parallel),
        }
    finally:
        distributed.shutdown()


def train_every_layout(rank: int, ports: dict[str, int]) -> dict[str, Any]:
    """Train in the layouts that have a port."""
    torch.set_num_threads(1)
    return {
        name: train(ParallelConfig(world_size=2, **LAYOUTS[name]), rank, port)
        for name, port in ports.items()
    }


CASES = layout_cases(LAYOUTS, slow=["pipeline", "uneven pipeline"])


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    ports = {name: free_port() for name in selected_layouts(request)}
    return run_distributed(train_every_layout, 2, ports)


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return train(ParallelConfig(), 0, free_port())


@pytest.mark.parametrize("layout", CASES)
def test_replay_under_a_layout_trains_as_in_one_process(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    want = one_rank["R3"]
    for rank in two_ranks:
        got = rank[layout]["R3"]
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert got["norms"] == pytest.approx(want["norms"], rel=2e-4)
        # The route of every sequence's last token is unknown.
        known = TINY.num_layers * (TOKENS - len(SAMPLES))
        assert got["compared"] == want["compared"] == [known] * STEPS
        assert got["agreeing"] == pytest.approx(want["agreeing"], abs=3)


def of_all_ranks(ranks: list[dict[str, Any]], layout: str, kind: str, name: str) -> Routes:
    return {key: experts for rank in ranks for key, experts in rank[layout][kind][name].items()}


@pytest.mark.parametrize("layout", CASES)
def test_recorded_routes_equal_replayed_routes(
    layout: str, two_ranks: list[dict[str, Any]]
) -> None:
    recorded = of_all_ranks(two_ranks, layout, "R3", "recorded")
    assert len(recorded) == TINY.num_layers * TOKENS
    assert SAMPLES.routed_experts is not None
    for (number, position, layer), experts in recorded.items():
        given = SAMPLES.routed_experts[number][position, layer]
        if position < len(SAMPLES.routed_experts[number]) - 1:
            assert experts == tuple(sorted(given))
        else:
            assert given[0] == unknown_route(given.dtype)
            assert len({*experts} & {*range(TINY.num_experts)}) == TINY.experts_per_token


@pytest.mark.parametrize("layout", CASES)
def test_recorded_routes_are_used_for_tokens_but_not_padding(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    for rank in (one_rank, *(rank[layout] for rank in two_ranks)):
        assert rank["R2"]["differing"] == 0
        assert rank["R2"]["padding"] >= STEPS * ALIGN
        assert rank["R2"]["padding_routed_anew"] > 0.3 * rank["R2"]["padding"]


@pytest.mark.parametrize("layout", CASES)
def test_ranks_record_routes_of_one_process_for_equal_tokens(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    want = one_rank["R2"]["recorded"]
    got = of_all_ranks(two_ranks, layout, "R2", "recorded")
    assert got.keys() == want.keys()
    assert len(want) == TINY.num_layers * TOKENS
    assert got == want
    # Without replay, the changed routers choose other experts.
    free = of_all_ranks(two_ranks, layout, "R2", "free")
    assert sum(free[token] != experts for token, experts in want.items()) > 0.3 * len(want)


@pytest.mark.parametrize("layout", CASES)
def test_replay_of_a_ranks_own_routes_trains_as_in_one_process(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    want = one_rank["R2"]
    assert want["losses"][-1] < want["losses"][0]
    for rank in two_ranks:
        got = rank[layout]["R2"]
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert got["norms"] == pytest.approx(want["norms"], rel=2e-4)
        assert got["compared"] == want["compared"] == [TINY.num_layers * TOKENS] * STEPS
        assert got["agreeing"] == pytest.approx(want["agreeing"], abs=3)
        assert got["agreeing"][0] < 0.7 * got["compared"][0]


@pytest.mark.parametrize("layout", CASES)
def test_the_critic_under_a_layout_learns_as_in_one_process(
    layout: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    want = one_rank["critic"]
    assert want["steps"][-1][0] < want["steps"][0][0]
    for rank in two_ranks:
        for got, expected in zip(rank[layout]["critic"]["steps"], want["steps"], strict=True):
            assert got == pytest.approx(expected, rel=2e-3)

    values = {i: row for rank in two_ranks for i, row in rank[layout]["critic"]["values"].items()}
    assert values.keys() == want["values"].keys() == {*range(len(DOCUMENTS))}
    for i, row in want["values"].items():
        np.testing.assert_allclose(values[i], row, atol=1e-2)


def test_one_byte_and_two_byte_experts_give_equal_steps() -> None:
    found = []
    distributed.initialize(ParallelConfig(), 0, port=free_port())
    try:
        for dtype in (np.dtype(np.uint8), np.dtype(np.int16)):
            trainer = policy(ParallelConfig())
            samples = with_random_routes(DOCUMENTS, dtype)
            batches = pack(samples, 64, align=ALIGN)[0]
            assert batches[0].routed_experts.numpy().dtype == dtype
            steps = [trainer.train_step(batches, mean_cross_entropy(TOKENS), 3e-3) for _ in "12"]
            weights = [parameter.detach().clone() for parameter in trainer.module.parameters()]
            found.append((select_statistics(steps), weights))
    finally:
        distributed.shutdown()

    (one_byte, byte_weights), (two_bytes, two_byte_weights) = found
    assert one_byte == two_bytes
    assert all(map(torch.equal, byte_weights, two_byte_weights))


class Router:
    """Router with only the attributes that LayerReplay reads."""

    def __init__(self, recompute: bool) -> None:
        self.training = True
        granularity, modules = ("selective", ["moe"]) if recompute else (None, None)
        self.config = type(
            "Config", (), {"recompute_granularity": granularity, "recompute_modules": modules}
        )()


def test_recomputed_layer_reuses_routes_of_its_micro_batch() -> None:
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
    )  # counted once, not again in recomputation
    assert not layer.pending
    assert not layer.pending_recompute


def test_unused_or_reused_routes_are_errors(one_rank: dict[str, Any]) -> None:
    layer = LayerReplay(Router(recompute=False), 3)
    layer.pending.append(None)
    layer.take()
    with pytest.raises(
        RuntimeError, match="layer 3 was called for more micro-batches than there are recorded"
    ):
        layer.take()
    replay = RoutingReplay(torch.nn.Module())
    replay.layers = [layer]
    replay.check_consumed()
    layer.pending.append(None)
    with pytest.raises(RuntimeError, match="has not used the recorded routes of 1 micro-batches"):
        replay.check_consumed()


def test_gradient_uses_gates_of_the_replayed_experts() -> None:
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
