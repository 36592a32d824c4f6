"""The SGLang engine against mock servers with the recorded protocol, with and without faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.embedded.backend import build_engine
from rl_loop.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    ModelShape,
    SamplingParams,
    check_result,
    server_client,
    weight_holder,
)
from rl_loop.engines.sglang.engine import SglangEngine
from rl_loop.engines.sglang.server import ServerState, ServerStatus
from rl_loop.infrastructure import EngineError
from tests.support.rl_loop.sglang_protocol import (
    FAULTS,
    LAYERS,
    LIES,
    RANDOM_WEIGHTS,
    SERVED_MODEL,
    TOP_K,
    LocalServer,
    log_prob,
    next_token,
    prefix_state,
)
from tests.support.waiting import PATIENCE_SECONDS, wait_until_async

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_loop.engines.sglang.engine.MAX_RETRY_DELAY", 0.02)


PROMPT = list(range(100, 140))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Servers:
    """Local servers and their reported states."""

    def __init__(self, servers: Sequence[LocalServer]) -> None:
        self.all = list(servers)
        self.version = 3
        self.states: dict[str, ServerState] = {}

    async def statuses(self) -> list[ServerStatus]:
        return [
            ServerStatus(s.url, self.states.get(s.url, ServerState.SYNCED), 1, self.version)
            if s.runner
            else ServerStatus(s.url, ServerState.DEAD)
            for s in self.all
        ]


@asynccontextmanager
async def engine_over(
    *servers: LocalServer, **options: float
) -> AsyncIterator[tuple[SglangEngine, Servers]]:
    fleet = Servers(servers)
    for server in servers:
        server.version = "3"
        await server.start()
    engine = SglangEngine(fleet.statuses, SERVED_MODEL, **options)
    engine.set_min_version(3)
    try:
        yield engine, fleet
    finally:
        await engine.close()
        for server in servers:
            await server.stop()


def request(
    tokens: list[int], new: int = 30, name: str = "e/0/0/0", routes: bool = False
) -> GenerateRequest:
    return GenerateRequest(name, tokens, SamplingParams(new, stop_token_ids=(5,)), routes)


def continuation(
    tokens: list[int], count: int, weights: str = RANDOM_WEIGHTS
) -> tuple[list[int], list[float]]:
    """Return the ids and log-probs that the servers' model samples after ``tokens``."""
    state = prefix_state(tokens, weights)
    ids, log_probs = [], []
    for _ in range(count):
        ids.append(next_token(state))
        state = prefix_state(ids[-1:], "", state)
        log_probs.append(log_prob(state))
    return ids, log_probs


def check(result: GenerateResult, prompt: list[int]) -> None:
    """Check that the result has every token and log-prob once, with the served weight version."""
    ids, log_probs = continuation(prompt, len(result.output_ids))
    assert result.output_ids == ids
    assert result.output_log_probs == log_probs
    assert result.weight_versions == ([WeightVersionSpan(0, len(ids), 3)] if ids else [])


async def test_tokens_log_probs_routes_and_versions_arrive_as_sampled() -> None:
    async with engine_over(LocalServer()) as (engine, _):
        result = await engine.generate(request(PROMPT, 30, routes=True))
        check(result, PROMPT)
        assert result.finish_reason is FinishReason.LENGTH
        assert result.routed_experts.shape == (len(PROMPT) + 29, LAYERS, TOP_K)
        assert result.routed_experts.dtype == np.uint8
        stop = result.output_ids[11]
        stopping = GenerateRequest("s/0/0/0", PROMPT, SamplingParams(30, stop_token_ids=(stop,)))
        result = await engine.generate(stopping)
        assert (result.finish_reason, result.output_ids[-1], len(result.output_ids)) == (
            FinishReason.STOP,
            stop,
            12,
        )


async def test_routes_begin_with_the_requested_token() -> None:
    async with engine_over(LocalServer()) as (engine, _):
        everything = await engine.generate(request(PROMPT, 30, routes=True))
        asked = replace(request(PROMPT, 30, routes=True), routes_start=len(PROMPT) - 1)
        rest = await engine.generate(asked)
        assert np.array_equal(rest.routed_experts, everything.routed_experts[len(PROMPT) - 1 :])
        check_result(asked, rest, ModelShape(SERVED_MODEL.vocab_size, LAYERS, TOP_K))


async def test_turns_reuse_their_prefix_and_episodes_balance_servers() -> None:
    servers = [LocalServer(token_seconds=0.002) for _ in range(4)]
    async with engine_over(*servers) as (engine, _):
        pauses = random.Random(0)  # tools take their time, so the servers' loads differ

        async def episode(number: int) -> tuple[int, int]:
            tokens, cached, reusable = [number] * 50, 0, 0
            for turn in range(4):
                result = await engine.generate(request(tokens, 20, f"task/{number}/{turn}/0"))
                cached += result.cached_tokens if turn else 0
                reusable += len(tokens) - 3 if turn else 0
                tokens = tokens + result.output_ids + [1, 2, 3]
                await asyncio.sleep(pauses.uniform(0, 0.05))
            return cached, reusable

        hits = await asyncio.gather(*map(episode, range(16)))
        assert sum(cached for cached, _ in hits) >= 0.9 * sum(reusable for _, reusable in hits)
        assert [len(server.served) for server in servers] == [16] * 4


async def test_episodes_of_a_task_use_the_same_server() -> None:
    servers = [LocalServer(token_seconds=0.002) for _ in range(4)]
    async with engine_over(*servers, keep_groups=True) as (engine, _):
        names = [f"split/task-{task}/{seed}/0/0" for task in range(8) for seed in range(3)]
        await asyncio.gather(*(engine.generate(request(PROMPT, 20, name)) for name in names))
        tasks = [{name.split("/")[1] for name in server.served} for server in servers]
        assert sum(map(len, tasks)) == 8
        assert [len(of_server) for of_server in tasks] == [2] * 4


async def test_aborted_turn_continues_from_its_tokens() -> None:
    server = LocalServer(token_seconds=0.01)
    async with engine_over(server) as (engine, _):
        sampling = asyncio.ensure_future(engine.generate(request(PROMPT, 500)))
        await wait_until_async(lambda: len(server.cache) >= len(PROMPT) + 30)
        await engine.abort("e/0/0/0")
        part = await sampling
        assert part.finish_reason is FinishReason.ABORT
        assert 0 < len(part.output_ids) < 500
        check(part, PROMPT)
        rest = await engine.generate(
            request(PROMPT + part.output_ids, 10, f"e/0/0/{len(part.output_ids)}")
        )
        assert (
            part.output_ids + rest.output_ids == continuation(PROMPT, len(part.output_ids) + 10)[0]
        )


async def test_abort_returns_even_if_a_server_hangs() -> None:
    server = LocalServer()
    async with engine_over(server, abort_seconds=0.2) as (engine, _):
        server.hangs = True
        sampling = asyncio.ensure_future(engine.generate(request(PROMPT)))
        await wait_until_async(lambda: server.running)
        await engine.abort()
        result = await asyncio.wait_for(sampling, PATIENCE_SECONDS)
        server.hangs = False
        assert (result.finish_reason, result.output_ids) == (FinishReason.ABORT, [])


async def test_turn_of_a_dead_server_continues_on_another_server() -> None:
    first, second = LocalServer(token_seconds=0.01), LocalServer(token_seconds=0.001)
    async with engine_over(first, second) as (engine, fleet):
        fleet.states[second.url] = ServerState.UNSYNCED
        asked = replace(request(PROMPT, 200, routes=True), routes_start=5)
        sampling = asyncio.ensure_future(engine.generate(asked))
        await wait_until_async(lambda: len(first.cache) >= len(PROMPT) + 30)
        fleet.states[second.url] = ServerState.SYNCED
        await first.stop()
        result = await sampling
        check(result, PROMPT)
        assert len(result.output_ids) == 200
        assert len(result.routed_experts) == len(PROMPT) + 199 - 5
        assert second.met == [] and len(second.served) == 1


async def test_only_servers_with_the_policys_weights_get_requests() -> None:
    restarted, good = LocalServer(), LocalServer()
    async with engine_over(restarted, good) as (engine, fleet):
        restarted.version = "default"  # restarted, but its last known state is still valid
        results = await asyncio.gather(
            *(engine.generate(request(PROMPT, 5, f"{i}/0/0/0")) for i in range(20))
        )
        assert len(good.served) == len(results) == 20
        for result in results:
            check(result, PROMPT)
        fleet.states = {restarted.url: ServerState.STARTING, good.url: ServerState.UNSYNCED}
        engine._wait_seconds, engine._refreshed_at = 0.3, 0.0
        with pytest.raises(
            RuntimeError, match=r"no SGLang server had policy weights 3 .* is unsynced"
        ):
            await engine.generate(request(PROMPT, 5, "late/0/0/0"))


async def test_missing_routes_and_rejected_requests_are_errors() -> None:
    server = LocalServer()
    async with engine_over(server) as (engine, _):
        server.zero_routes = True
        with pytest.raises(RuntimeError, match="routed experts of layer 0 were not recorded"):
            await engine.generate(request(PROMPT, routes=True))
        server.rejects = True
        with pytest.raises(ValueError, match="input is too long"):
            await engine.generate(request(PROMPT))


async def test_score_covers_every_token_at_temperature_1_only() -> None:
    async with engine_over(LocalServer()) as (engine, _):
        ids, log_probs = continuation(PROMPT, 20)
        scores = await engine.score(PROMPT + ids)
        assert scores[len(PROMPT) - 1 :] == log_probs
        assert len(scores) == len(PROMPT) + 19
        with pytest.raises(ValueError, match="temperature 1 only"):
            await engine.score(ids, 0.5)


async def test_1000_episodes_with_injected_faults_complete_once() -> None:
    servers = [LocalServer(faults=0.05, seed=i) for i in range(4)]
    async with engine_over(*servers) as (engine, _):

        async def episode(number: int) -> list[int]:
            tokens = [number % 900, number // 900] * 8
            for turn in range(3):
                result = await engine.generate(request(tokens, 16, f"task/{number}/{turn}/0"))
                assert result.finish_reason is FinishReason.LENGTH
                check(result, tokens)
                tokens = tokens + result.output_ids + [turn] * 5
            return tokens

        killer = asyncio.ensure_future(asyncio.sleep(0.5))
        killer.add_done_callback(lambda _: asyncio.ensure_future(servers[3].stop()))
        episodes = await asyncio.gather(*map(episode, range(1000)))
        met = [fault for server in servers for fault in server.met]
        assert set(met) == set(FAULTS)
        assert len(met) > 0.04 * 3000
        assert len(episodes) == len({tuple(tokens) for tokens in episodes}) == 1000
        assert all(len(tokens) == 16 + 3 * (16 + 5) for tokens in episodes)
        # Servers end requests without a waiting client.
        await wait_until_async(lambda: not any(server.running for server in servers[:3]))


@pytest.mark.parametrize("lie", LIES)
async def test_invalid_response_of_a_server_names_the_server(lie: str) -> None:
    """Covers one server, where no other can answer, and one of two servers."""
    liar, honest = LocalServer(), LocalServer()
    liar.always = lie
    async with engine_over(liar) as (engine, _):
        with pytest.raises(
            EngineError, match=rf"request e/0/0/0: had 20 faults, the last: {liar.url}"
        ):
            await engine.generate(request(PROMPT, 30))
        assert len(liar.served) == 20
    async with engine_over(liar, honest) as (engine, _):
        results = await asyncio.gather(
            *(engine.generate(request(PROMPT, 30, f"e/{i}/0/0")) for i in range(4))
        )
        for result in results:
            check(result, PROMPT)


async def test_sglang_request_begins_with_its_first_tokens() -> None:
    server = LocalServer()
    async with engine_over(server) as (engine, _):
        begun = asyncio.Event()
        server.hangs = True
        running = asyncio.ensure_future(
            engine.generate(replace(request(PROMPT, 5), on_begin=begun.set))
        )
        await asyncio.sleep(0.1)
        assert not begun.is_set()
        server.hangs = False
        await running
        assert begun.is_set()


async def test_wrong_kind_of_engine_is_named_with_the_call_to_use() -> None:
    holder = build_engine(SERVED_MODEL, "fp32", max_batch_size=1)
    async with engine_over() as (client, _):
        assert weight_holder(holder) is holder
        assert server_client(client) is client
        with pytest.raises(TypeError, match=r"SglangEngine has no sync_weights.*set_min_version$"):
            weight_holder(client)
        with pytest.raises(TypeError, match=r"TransformersEngine has no set_min.*load_weights$"):
            server_client(holder)
    await holder.close()
