"""Transfer of routes from the engine to the ranks through a real Ray store."""

from __future__ import annotations

import gc
import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.data.rollout_batch import RolloutBatch
from rl_loop.data.stored_routes import StoredRoutes
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.backend import BackendContext, EngineConfig, RolloutBackend
from rl_loop.engines.protocol import GenerateRequest, GenerateResult
from rl_loop.rollout.collector import RolloutCollector, TrainingRequests, held_out_requests
from rl_loop.rollout.pool import RolloutPool
from rl_loop.run_parts import build_tasks
from rl_loop.trainer.step_plan import load_routes
from rl_loop.weight_sync.source import WeightSource
from tests.support.forked_workers import local_ray
from tests.support.waiting import wait_until

CONFIG = Path(__file__).parents[3] / "configs/rl/tiny_retool.yaml"
LAYERS, TOP_K, EXPERTS = 36, 4, 128
TURN = 2000
"""Sampled tokens per turn: many, because Ray does not put small objects into the store."""
TASKS, EPISODES, WORKERS = 3, 2, 2


def build_routes(ids: Sequence[int]) -> np.ndarray:
    """Return valid routes that differ for every token and every layer."""
    first = np.asarray(ids)[:-1, None, None] + 7 * np.arange(len(ids) - 1)[:, None, None]
    chosen = first + np.arange(LAYERS)[:, None] + np.arange(TOP_K)
    return (chosen % EXPERTS).astype(np.uint8)


class RoutedEngine:
    """An engine that samples one long turn and returns its routes."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        seed = request.sampling.seed or 0
        ids = np.random.default_rng(seed).integers(20, 90, TURN).tolist()
        routes = build_routes(request.input_ids + ids) if request.return_routed_experts else None
        return GenerateResult(
            output_ids=ids,
            output_log_probs=[-1.0] * TURN,
            finish_reason=FinishReason.LENGTH,
            weight_versions=[WeightVersionSpan(0, TURN, 0)],
            routed_experts=routes,
        )

    async def close(self) -> None: ...


class RoutedBackend(RolloutBackend):
    """A ``RoutedEngine`` in every worker."""

    def engine_factory(self) -> Any:
        return RoutedEngine

    def sync_weights(self, source: WeightSource, version: int) -> None: ...

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        return []

    def engine_settings(self, names: Sequence[str]) -> dict[str, Any]:
        return {}


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    with local_ray(num_cpus=2, object_store_bytes=200 << 20):
        yield


def settings(tmp_path: Path, *overrides: str) -> RlConfig:
    options = [
        f"model.num_layers={LAYERS}",
        "model.max_length=4096",
        f"model.num_experts={EXPERTS}",
        f"model.experts_per_token={TOP_K}",
        f"rollout.max_sampled_tokens_per_turn={TURN}",
        "rollout.max_episode_tokens=4096",
        "rollout.routed_experts=true",
        f"rollout.workers={WORKERS}",
        f"rollout.tasks_per_step={TASKS}",
        f"rollout.samples_per_task={EPISODES}",
        "tasks.held_out_tasks=2",
        f"output_dir={tmp_path}",
        *overrides,
    ]
    return load_config(CONFIG, RlConfig, options)


@pytest.fixture
def config(tmp_path: Path) -> RlConfig:
    return settings(tmp_path)


@pytest.fixture(scope="module")
def one_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutPool]:
    config = settings(tmp_path_factory.mktemp("pool"))
    context = BackendContext(config.model, config.dtype, 0, config.output_dir, routed_experts=True)
    made = RolloutPool(RoutedBackend(EngineConfig(), context), config)
    try:
        made.ready()
        yield made
    finally:
        made.close()


@pytest.fixture
def pool(one_pool: RolloutPool) -> RolloutPool:
    # Objects of the previous test are freed in the background.
    gc.collect()
    wait_until(lambda: stored_bytes() < 100_000)
    return one_pool


def collector(pool: RolloutPool, config: RlConfig) -> RolloutCollector:
    requests = TrainingRequests(build_tasks(config), config.rollout, seed=1)
    return RolloutCollector(pool, requests, config.algorithm, steps=4)


def collect_first(pool: RolloutPool, config: RlConfig) -> RolloutBatch:
    first = collector(pool, config)
    first.begin(0)
    return first.collect(0)


def stored_bytes() -> int:
    """Return the bytes in the store of this Ray, pinned or not."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats.object_store_bytes_used


def stored_routes(batch: RolloutBatch) -> list[StoredRoutes]:
    rows = [episode.routed_experts for episode in batch.episodes]
    assert len(rows) == TASKS * EPISODES
    assert all(isinstance(row, StoredRoutes) for row in rows)
    return rows  # type: ignore[return-value]


def test_routes_are_stored_once_and_freed_with_their_groups(
    pool: RolloutPool, config: RlConfig
) -> None:
    empty = stored_bytes()
    batch = collect_first(pool, config)
    rows = stored_routes(batch)
    weight = sum(row.nbytes for row in rows)
    assert weight > len(rows) * TURN * LAYERS * TOP_K

    # The store also holds the other columns of the groups, 9 bytes per token.
    wait_until(lambda: stored_bytes() - empty >= weight)
    assert stored_bytes() - empty < 1.2 * weight
    assert len(pickle.dumps([t.token_ids for t in batch.episodes])) < 0.1 * weight

    for row, episode in zip(load_routes(rows), batch.episodes, strict=True):
        assert np.array_equal(row, build_routes(episode.token_ids.tolist()))
        assert (row.shape, row.dtype) == (
            episode.routed_experts.shape,  # type: ignore[union-attr]
            episode.routed_experts.dtype,  # type: ignore[union-attr]
        )
        assert not row.flags.owndata, "a view into the store"
    assert stored_bytes() - empty < 1.2 * weight

    del batch, rows, row, episode
    gc.collect()
    wait_until(lambda: stored_bytes() - empty < 0.1 * weight)


def test_routes_outlive_the_worker_that_recorded_them(pool: RolloutPool, config: RlConfig) -> None:
    batch = collect_first(pool, config)
    for index in range(WORKERS):
        os.kill(
            pool._workers.call(index, "__ray_call__", lambda worker: os.getpid()), signal.SIGKILL
        )
    # Wait until Ray has noticed the deaths, because it may free objects then.
    for index in range(WORKERS):
        pool._workers.call(index, "__ray_call__", lambda worker: os.getpid())
    assert len(pool._workers.deaths) == WORKERS
    for row, episode in zip(load_routes(stored_routes(batch)), batch.episodes, strict=True):
        assert np.array_equal(row, build_routes(episode.token_ids.tolist()))


def test_routes_of_off_policy_episodes_wait_for_their_step(
    pool: RolloutPool, tmp_path: Path
) -> None:
    empty = stored_bytes()
    asynchronous = collector(pool, settings(tmp_path, "algorithm.max_staleness=1"))
    asynchronous.begin(0)
    asynchronous.collect(0)
    gc.collect()
    batch = asynchronous.collect(1)
    weight = sum(row.nbytes for row in stored_routes(batch))
    wait_until(lambda: weight <= stored_bytes() - empty < 1.2 * weight)
    for row, episode in zip(load_routes(stored_routes(batch)), batch.episodes, strict=True):
        assert np.array_equal(row, build_routes(episode.token_ids.tolist()))

    del batch, row, episode
    gc.collect()
    wait_until(lambda: stored_bytes() - empty < 0.1 * weight)
    asynchronous.close()


def test_held_out_episodes_have_no_routes_by_default(pool: RolloutPool, config: RlConfig) -> None:
    tasks = build_tasks(config)
    for group in pool.run(held_out_requests(tasks, 1.0)):
        assert [episode.routed_experts for episode in group.trajectories] == [None]
    for group in pool.run(held_out_requests(tasks, 1.0, with_routes=True)):
        (episode,) = group.trajectories
        assert isinstance(episode.routed_experts, StoredRoutes)
