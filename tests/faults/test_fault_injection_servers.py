"""Servers of the fault-injection test, which sample from the policy, and pairs of faults."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch

from converters.names import hf_shapes
from converters.random_weights import random_hf_weights
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.engines.embedded.backend import build_engine
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from rl_loop.engines.sglang.engine import SglangEngine
from rl_loop.engines.sglang.server import ServerState, ServerStatus
from rl_loop.engines.sglang.turn import STREAM_INTERVAL
from rl_loop.engines.sglang.weight_endpoints import send_weights
from rl_loop.tracking.run_directory import RunDirectory
from rl_loop.weight_sync.servers import SyncPlan
from rl_loop.weight_sync.source import WeightMismatchError
from tests.faults.checks import judge_outcome
from tests.faults.engine import DAMAGED
from tests.faults.injector import FaultInjector
from tests.faults.kinds import KINDS, SERVER_KINDS, Kind, Moment, NotPossibleYetError
from tests.faults.observed_run import Attempt, ObservedRun
from tests.faults.options import Options
from tests.faults.pairs import OnlyFirstError, find_kind, plan_pairs
from tests.faults.results import Injection
from tests.faults.server import PolicyServer, ServerOptions

HEADER = [7, 8]
PROMPT = [3, 4, 5, *HEADER]
MODEL = GptOssModelConfig(
    num_layers=2, num_experts=4, experts_per_token=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
    num_key_value_heads=2, head_size=16, vocab_size=640, max_length=1024,
)  # fmt: skip
VERSION = 6
"""Version of the servers' weights. It is even, so the sync's sample is of layer 0."""


def draw_weights(seed: int) -> dict[str, torch.Tensor]:
    get = random_hf_weights(MODEL, seed)
    return {name: get(name).float() for name in hf_shapes(MODEL)}


class Servers:
    """Two servers, the trainer that sends them weights, and a client."""

    def __init__(self, orders: Path) -> None:
        self.orders = orders
        self.options = ServerOptions(
            call=[20, 21, 22], answer=[30, 31, 32], orders=orders, header=HEADER
        )
        self.servers = [PolicyServer(MODEL, "float32", self.options) for _ in range(2)]
        self.urls: tuple[str, ...] = ()
        self.engine = SglangEngine(self._statuses, MODEL)

    async def _statuses(self) -> list[ServerStatus]:
        return [ServerStatus(url, ServerState.SYNCED, version=VERSION) for url in self.urls]

    async def start(self) -> None:
        self.urls = tuple([await server.start() for server in self.servers])
        await self.sync(1, VERSION)
        self.engine.set_min_version(VERSION)

    async def stop(self) -> None:
        await self.engine.close()
        for server in self.servers:
            await server.stop()

    async def sync(self, seed: int, version: int) -> None:
        plan = SyncPlan(urls=self.urls, version=version, transport="shared_memory")
        await send_weights(draw_weights(seed).items(), MODEL, plan)

    def order(self, name: str) -> None:
        (self.orders / name).touch()

    @property
    def left(self) -> list[str]:
        """Names of orders that were not executed."""
        return [file.name for file in self.orders.iterdir()]


@asynccontextmanager
async def serving(orders: Path) -> AsyncIterator[Servers]:
    servers = Servers(orders)
    await servers.start()
    try:
        yield servers
    finally:
        await servers.stop()


def request(seed: int, begun: Callable[[], object] | None = None) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=60, seed=seed)
    return GenerateRequest(
        f"episode/{seed}/0/0", PROMPT, sampling, return_routed_experts=True, on_begin=begun
    )


async def embedded(seed: int) -> GenerateResult:
    """Return the result of the embedded engine with the weights of the servers."""
    engine = build_engine(MODEL, "fp32", 16, deterministic=True)
    await engine.sync_weights(draw_weights(1).items(), VERSION)
    try:
        return await engine.generate(request(seed))
    finally:
        await engine.close()


def assert_same(found: GenerateResult, expected: GenerateResult) -> None:
    assert found.output_ids == expected.output_ids
    assert found.output_log_probs == expected.output_log_probs
    assert np.array_equal(
        cast(np.ndarray, found.routed_experts), cast(np.ndarray, expected.routed_experts)
    )


def test_turn_equals_embedded_engine_after_connection_loss(
    tmp_path: Path,
) -> None:
    """The connection is closed after the first chunk, and the turn continues from there."""

    async def run() -> None:
        async with serving(tmp_path) as servers:
            for server in servers.servers:
                server.token_seconds = 0.02
            # on_begin is called with every chunk
            orders = iter(["cut"])
            asked = request(4, begun=lambda: [servers.order(name) for name in orders])
            found = await servers.engine.generate(asked)
            assert len(found.output_ids) == 60 > STREAM_INTERVAL and servers.left == []
            assert sum(len(server.served) for server in servers.servers) == 2
            assert_same(found, await embedded(4))

    asyncio.run(run())


@pytest.mark.parametrize("lie", ["nan", "old", "twice"])
def test_false_answer_of_server_is_requested_again(tmp_path: Path, lie: str) -> None:
    async def run() -> None:
        async with serving(tmp_path) as servers:
            await asyncio.gather(*(servers.engine.generate(request(seed)) for seed in (8, 12)))
            servers.order(lie)
            found = await servers.engine.generate(request(4))
            assert servers.left == []
            assert sum(len(server.served) for server in servers.servers) == 4
            assert_same(found, await embedded(4))

    asyncio.run(run())


def test_a_server_whose_routes_are_zero_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as servers:
            servers.order("routes")
            with pytest.raises(RuntimeError, match=SERVER_KINDS["answer_routes"].named_by):
                await servers.engine.generate(request(4))

    asyncio.run(run())


def test_scripted_turn_has_log_probs_and_routes_of_the_policy(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as servers:
            found = await servers.engine.generate(request(5))
            assert found.output_ids == [20, 21, 22]
            text = [*PROMPT, *found.output_ids]
            assert found.output_log_probs == (await servers.engine.score(text))[-3:]
            routes = cast(np.ndarray, found.routed_experts)
            assert routes.shape == (len(text) - 1, 2, 2)
            # routes of a prompt are independent of the tokens after it
            same_prompt = cast(np.ndarray, (await embedded(4)).routed_experts)
            assert np.array_equal(routes[: len(PROMPT)], same_prompt[: len(PROMPT)])

    asyncio.run(run())


def test_sync_detects_flipped_bit_and_stale_tensor(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as servers:
            await servers.sync(2, VERSION)
            servers.order("bucket")
            with pytest.raises(WeightMismatchError, match=f"but its content differs in {DAMAGED}"):
                await servers.sync(1, VERSION)

            # Every run compares a sync of version 7. Its sample is of layer 1.
            servers.order("keep")
            with pytest.raises(
                WeightMismatchError, match=r"differs in model\.layers\.1\.self_attn"
            ):
                await servers.sync(3, VERSION + 1)
            assert servers.left == []

    asyncio.run(run())


def test_an_episode_of_other_weights_is_not_one_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {"step": 4, "split": "train", "invalid": None, "task_id": "a", "oldest_version": 3}
    rows = [row | {"newest_version": version} for version in (3, 3, 4)]

    class Reader:
        summary_table = pa.Table.from_pylist(rows)

        def refresh(self) -> None: ...

    monkeypatch.setattr("tests.faults.observed_run.EpisodeReader", lambda path: Reader())
    run = ObservedRun.__new__(ObservedRun)
    run.files = RunDirectory(Path("runs/any"))
    assert run.episodes() == {4: Counter({"a": 2, "a of weights 3 to 4": 1})}


# -- two faults at once ----------------------------------------------------------------------------


def test_pairs_have_equal_kind_counts_and_run_enders_second() -> None:
    kinds = [*KINDS, *SERVER_KINDS]
    pairs = plan_pairs(kinds, 2 * len(kinds), random.Random(3))
    assert pairs == plan_pairs(kinds, 2 * len(kinds), random.Random(3))
    assert pairs != plan_pairs(kinds, 2 * len(kinds), random.Random(4))
    assert Counter("+".join(pairs).split("+")) == dict.fromkeys(kinds, 4)
    assert not any(find_kind(pair.split("+")[0]).ends_at_once for pair in pairs)

    with pytest.raises(ValueError, match="end a run at once: kill_run, kill_node"):
        plan_pairs(["kill_run", "stop", "kill_node"], 3, random.Random(3))


def test_pairs_option_plans_pairs_of_kinds(tmp_path: Path) -> None:
    options = Options(seed=3, kinds=("kill_worker", "answer_nan", "stop"), count=6, pairs=True)
    left = FaultInjector(options, tmp_path).left
    assert len(left) == 6 and all(name.count("+") == 1 for name in left)


class Ended:
    """An attempt whose driver has exited with status 1."""

    returncode = 1

    @property
    def driver(self) -> Ended:
        return self


@pytest.mark.parametrize(
    ("kind", "outcome", "message", "verdict"),
    [
        ("kill_worker+answer_nan", "recovered", "", ""),
        ("kill_worker+answer_nan", "ended", "gptoss: x", "should have gone on"),
        ("kill_worker+kill_trainer", "recovered", "", "nothing has noticed it"),
        ("kill_worker+kill_trainer", "ended", "gptoss: trainer rank 0 died", ""),
        ("kill_worker+kill_trainer", "ended", "gptoss: x", "another cause"),
        ("kill_trainer+answer_version", "ended", "gptoss: engine reports weight version 9", ""),
        # the killed worker may be the one with the false answer
        ("answer_version+kill_worker", "recovered", "", ""),
        ("stop+answer_version", "ended", "gptoss: it hangs", ""),
        ("stop+answer_version", "ended", "", "without saying why"),
        ("kill_server+kill_run", "ended", "", ""),
    ],
)
def test_pair_of_faults_may_have_outcomes_of_either(
    kind: str, outcome: str, message: str, verdict: str
) -> None:
    found = judge_outcome(
        cast(Attempt, Ended()), Injection(kind, 1, outcome=outcome, message=message)
    )
    assert verdict in found and bool(found) == bool(verdict)


def test_only_first_fault_counts_when_second_has_no_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def inject(name: str, is_possible: bool) -> Any:
        def act(moment: Moment) -> str:
            if not is_possible:
                raise NotPossibleYetError(name)
            done.append(name)
            return name

        return act

    for name, is_possible in [("stop", True), ("starve", True), ("fill", False)]:
        monkeypatch.setitem(KINDS, name, Kind(inject(name, is_possible)))
    monkeypatch.setattr("tests.faults.pairs.LONGEST_BETWEEN", 0.01)
    moment = cast(Moment, Moment(*2 * [cast(Any, None)], random.Random(0), Options()))
    assert find_kind("stop+starve").inject(moment) == "stop; starve"
    assert sorted(done) == ["starve", "stop"]
    for pair in ("stop+fill", "fill+stop"):
        with pytest.raises(OnlyFirstError) as one:
            find_kind(pair).inject(moment)
        assert one.value.kind == "stop"
    with pytest.raises(NotPossibleYetError):
        find_kind("fill+fill").inject(moment)
