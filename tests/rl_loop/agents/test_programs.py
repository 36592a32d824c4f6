"""Episodes of external agents: real processes and HTTP, with a scripted policy."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples import clerk_agent
from rl_loop.agents import episode as episode_module
from rl_loop.agents import process as process_module
from rl_loop.agents.episode import AgentRunner
from rl_loop.agents.process import AgentProcesses
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.chat.codec import ChatCodec
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.chatml.vocabulary import tiny_vocabulary
from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.credit import rewards_differ
from rl_loop.data.trajectory import FinishReason, Trajectory, TrajectoryGroup
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, ModelShape, SamplingParams
from rl_loop.environments import RewardConfig, make_offline_environment
from rl_loop.environments.black_box import BlackBoxEnvironment, BlackBoxOptions
from rl_loop.gateway.server import Gateway, GatewaySettings
from rl_loop.gateway.session import SessionSettings
from rl_loop.harmony.codec import Harmony, ParsedMessage
from tests.support.processes import read_command
from tests.support.rl_loop.scripted_engine import ScriptedEngine
from tests.support.waiting import wait_until_async

LIMITS = EpisodeLimits(max_turns=6, max_episode_tokens=400, max_episode_seconds=120.0)
SAMPLING = SamplingParams(max_new_tokens=100)
PROGRAMS = "tests.support.rl_loop.agents.programs"


def says(harmony: Harmony, text: str, channel: str = "final") -> list[int]:
    return harmony.render_assistant([ParsedMessage(channel, None, None, text)], "<|return|>")


def calls(harmony: Harmony, name: str, **arguments: object) -> list[int]:
    text = json.dumps(arguments)
    message = ParsedMessage("commentary", f"functions.{name}", "<|constrain|>json", text)
    return harmony.render_assistant([message], "<|call|>")


@asynccontextmanager
async def running(
    codec: ChatCodec, engine: Any, limits: EpisodeLimits = LIMITS
) -> AsyncIterator[AgentRunner]:
    settings = GatewaySettings(SessionSettings(limits, SAMPLING))
    gateway = Gateway(engine, codec, ModelShape(codec.vocabulary.size), settings)
    await gateway.start()
    processes = AgentProcesses()
    try:
        yield AgentRunner(gateway, processes, limits)
    finally:
        await gateway.close()
        await processes.close()


async def play(runner: AgentRunner, name: str, *, seed: int = 0, **task: Any) -> Trajectory:
    parts = ["politeness"] if name == "plain" else []
    options = BlackBoxOptions(agent=f"{PROGRAMS}:{name}", parts=parts, memory_gb=2)
    return await play_task(runner, options, {"prompt": "Hi", "answer": "Hello", **task}, seed=seed)


async def play_task(
    runner: AgentRunner, options: BlackBoxOptions, record: dict[str, Any], *, seed: int = 0
) -> Trajectory:
    made = BlackBoxEnvironment.from_record(record, "task", options)
    environment = make_offline_environment(made)
    return await runner.run_episode("task", environment, SAMPLING, seed=seed)


def play_turns(
    codec: ChatCodec,
    name: str,
    turns: Sequence[list[int]],
    limits: EpisodeLimits = LIMITS,
    **task: Any,
) -> Trajectory:
    async def run() -> Trajectory:
        async with running(codec, ScriptedEngine(turns), limits) as runner:
            return await play(runner, name, **task)

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_module, "AGENT_RETRY_DELAYS", (0.01, 0.01))
    monkeypatch.setattr(process_module, "CANCEL_SECONDS", 0.5)


@pytest.mark.parametrize("name", ["plain", "with_openai"])
@pytest.mark.parametrize(("answer", "score"), [("Hello", 1.0), ("Bye", 0.0)])
def test_episode_has_the_score_returned_by_its_agent(
    tiny: Harmony, name: str, answer: str, score: float
) -> None:
    episode = play_turns(tiny, name, [says(tiny, answer)])
    assert episode.invalid is None
    assert episode.reward == 2 * score - 1
    assert episode.reward_parts["score"] == score
    assert episode.reward_parts.get("politeness") == (0.25 if name == "plain" else None)
    assert episode.finish_reason is FinishReason.STOP
    assert episode.branches == []

    # The episode has exactly the tokens of the engine's prompt and the sampled tokens.
    sampled = says(tiny, answer)
    assert episode.token_ids[-len(sampled) :].tolist() == sampled
    assert episode.loss_mask.tolist() == [
        i >= len(episode) - len(sampled) for i in range(len(episode))
    ]


def test_every_sampled_span_of_a_branching_episode_trains_once(
    tiny: Harmony,
) -> None:
    texts = ["Hello", "One", "Two", "Three"]
    episode = play_turns(tiny, "branching", [says(tiny, text) for text in texts])
    assert episode.invalid is None
    assert len(episode.sequences) == 3

    trained = [
        tiny.decode(sequence.token_ids[sequence.loss_mask].tolist())
        for sequence in episode.sequences
    ]
    spoken = [tiny.decode(says(tiny, text)) for text in texts]
    assert trained == [spoken[0] + spoken[1], spoken[2], spoken[3]]
    # The first answer is context of the second continuation.
    assert spoken[0] in tiny.decode(episode.branches[0].token_ids.tolist())
    assert {sequence.reward for sequence in episode.sequences} == {0.0}
    assert episode.episode_assistant_turns == 4


@pytest.mark.parametrize("name", ["with_openai", "branching"])
def test_external_agent_uses_a_chatml_model(name: str) -> None:
    codec = ChatMl(tiny_vocabulary(512, "Hello One Two Three"), ChatMlConfig(system=None))

    def said(text: str) -> list[int]:
        return codec.render_assistant([ParsedMessage("final", None, None, text)])

    texts = ["Hello", "One", "Two", "Three"] if name == "branching" else ["Hello"]
    episode = play_turns(codec, name, [said(text) for text in texts])
    assert episode.invalid is None
    assert episode.reward == (0.0 if name == "branching" else 1.0)
    trained = [
        codec.decode(sequence.token_ids[sequence.loss_mask].tolist())
        for sequence in episode.sequences
    ]
    spoken = [codec.decode(said(text)) for text in texts]
    if name == "branching":
        assert trained == [spoken[0] + spoken[1], spoken[2], spoken[3]]
    else:
        assert trained == spoken


class OrderPolicy(ScriptedEngine):
    """Plays the clerk of ``run_order`` by the text before a turn. One answer is wrong."""

    def __init__(self, codec: Harmony, order: dict[str, Any]) -> None:
        super().__init__([])
        self._codec = codec
        self._wanted = {line["item"]: line for line in order["wanted"]}
        self._wrong = order["wanted"][2]["item"]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        # Questions arrive in any order, so turns cannot be scripted in sequence.
        self._turns = [self._choose_turn(self._codec.decode(request.input_ids))]
        return await super().generate(request)

    def _choose_turn(self, text: str) -> list[int]:
        asked = re.search(r"What does the (\w+) cost", text)
        if asked is None:
            return says(self._codec, clerk_agent.GREETING)
        wanted = self._wanted[asked[1]]
        if "functions.price to=assistant" not in text:
            return calls(self._codec, "price", item=wanted["item"], town=wanted["town"])
        price = wanted["price"] + (wanted["item"] == self._wrong)
        return says(self._codec, clerk_agent.right_answer(wanted["item"], price))


def test_questions_of_an_order_are_branches_of_its_history(tiny: Harmony) -> None:
    order = clerk_agent.orders("train", 0, 0)
    engine = OrderPolicy(tiny, order)
    limits = LIMITS.model_copy(update={"max_turns": 20, "max_episode_tokens": 2000})
    options = BlackBoxOptions(agent="examples.clerk_agent:run_order", memory_gb=2)

    async def run() -> Trajectory:
        async with running(tiny, engine, limits) as runner:
            return await play_task(runner, options, order)

    episode = asyncio.run(run())
    assert episode.invalid is None, episode.invalid
    assert episode.reward_parts["score"] == pytest.approx(5 / 6)
    assert len(episode.sequences) == clerk_agent.ORDERED_ITEMS
    assert episode.episode_assistant_turns == 1 + 2 * clerk_agent.ORDERED_ITEMS

    # All sequences begin with the order and the greeting, which the first one trains on.
    greeting = says(tiny, clerk_agent.GREETING)
    history = len(engine.requests[0].input_ids) + len(greeting)
    assert len({tuple(s.token_ids[:history].tolist()) for s in episode.sequences}) == 1
    trained = [int(s.loss_mask[:history].sum()) for s in episode.sequences]
    assert trained == [len(greeting)] + [0] * 5


def test_rewards_over_http_sum_and_replace_those_of_equal_name(tiny: Harmony) -> None:
    episode = play_turns(tiny, "posting", [says(tiny, "Hello")])
    assert episode.invalid is None, episode.invalid
    assert episode.reward_parts["score"] == 0.75


@pytest.mark.parametrize(
    ("name", "component", "reason"),
    [
        ("silent", "checker", "returned no reward and posted none"),
        ("idle", "environment", "returned without a request to the policy"),
        ("wrong_parts", "checker", "returned the reward parts score, tone. Expected: score"),
        ("broken", "environment", "ConnectionError: the database is away"),
        ("exiting", "environment", "SystemExit: enough"),
        ("greedy_for_memory", "environment", "MemoryError"),
    ],
)
def test_failure_of_an_agent_is_invalid_and_names_the_component(
    tiny: Harmony, name: str, component: str, reason: str, tmp_path: Path
) -> None:
    turns = [says(tiny, "Hello")] * 3
    episode = play_turns(tiny, name, turns, file=str(tmp_path / "count"))
    assert episode.invalid is not None
    assert episode.invalid.component == component
    assert f"{PROGRAMS}:{name}" in episode.invalid.reason
    assert reason in episode.invalid.reason
    assert math.isnan(episode.reward)
    if name == "broken":
        assert (tmp_path / "count").read_text() == "3", "it is played again first"


def test_answer_that_kills_its_agents_process_is_wrong(tiny: Harmony) -> None:
    """The last attempt runs alone in its process: no other episode can have ended that."""
    episode = play_turns(tiny, "killed_by_an_answer", [says(tiny, "Hello")] * 3)
    assert episode.invalid is None, episode.invalid
    assert episode.reward == -1.0


def test_agent_process_that_ends_before_any_request_is_invalid(tiny: Harmony) -> None:
    episode = play_turns(tiny, "killed_before_the_policy", [says(tiny, "Hello")] * 3)
    assert episode.invalid is not None
    assert "its process was killed by SIGSEGV" in episode.invalid.reason


@pytest.mark.parametrize("name", ["broken_once", "killed_once"])
def test_episode_is_repeated_after_an_infrastructure_failure(
    tiny: Harmony, name: str, tmp_path: Path
) -> None:
    turns = [says(tiny, "Hello")] * 2
    episode = play_turns(tiny, name, turns, file=str(tmp_path / "count"))
    assert episode.invalid is None, episode.invalid
    assert episode.reward == 1.0
    assert (tmp_path / "count").read_text() == "2"


def test_agent_module_that_cannot_be_imported_is_named(tiny: Harmony) -> None:
    async def run() -> Trajectory:
        async with running(tiny, ScriptedEngine([])) as runner:
            options = BlackBoxOptions.model_construct(agent="no_such_module:run")
            made = BlackBoxEnvironment.from_record({"prompt": "Hi"}, "task", options)
            environment = make_offline_environment(made)
            return await runner.run_episode("task", environment, SAMPLING, seed=0)

    episode = asyncio.run(run())
    assert episode.invalid is not None
    assert "No module named 'no_such_module'" in episode.invalid.reason


# ---- mistakes of the policy


def test_malformed_message_is_a_format_error_despite_a_reward(tiny: Harmony) -> None:
    episode = play_turns(tiny, "plain", [says(tiny, "x", channel="nonsense")])
    assert episode.invalid is None
    assert episode.finish_reason is FinishReason.FORMAT_ERROR
    assert episode.format_error is not None
    assert episode.reward == RewardConfig().format_error
    assert episode.reward_parts["politeness"] == 0.0


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_turns": 3}, FinishReason.MAX_TURNS),
        ({"max_episode_tokens": 70}, FinishReason.MAX_EPISODE_TOKENS),
        ({"max_sampled_tokens": 30}, FinishReason.MAX_SAMPLED_TOKENS),
    ],
)
def test_agent_that_reaches_a_limit_truncates_its_episode(
    tiny: Harmony, limits: dict[str, int], reason: FinishReason
) -> None:
    turns = [says(tiny, "Hello")] * 10
    episode = play_turns(tiny, "talkative", turns, LIMITS.model_copy(update=limits))
    assert episode.invalid is None, episode.invalid
    assert episode.finish_reason is reason
    assert episode.truncated
    assert episode.reward == -1.0


@pytest.mark.parametrize(
    ("plan", "excluded"),
    [
        ([(None, None), (None, None)], [False, False]),
        # A whole answer before a probe of 3 tokens, and a truncated answer before a whole probe.
        ([(None, None), (None, 3)], [False, True]),
        ([(None, 3), (None, None)], [True, False]),
        ([(None, None), (0, 3), (0, None)], [True, False]),
        ([(None, 3), (None, 3)], [True, True]),
    ],
)
def test_only_truncated_sequences_are_masked(
    tiny: Harmony, plan: list[tuple[int | None, int | None]], excluded: list[bool]
) -> None:
    limits = LIMITS.model_copy(update={"truncated_episodes": "mask"})
    turns = [says(tiny, "Hello")] * len(plan)
    episode = play_turns(tiny, "planned", turns, limits, plan=plan)
    assert episode.invalid is None, episode.invalid
    assert [sequence.excluded for sequence in episode.sequences] == excluded
    assert episode.truncated is any(excluded)
    assert rewards_differ(build_group(episode), AlgorithmConfig()) is not all(excluded)

    # Whole turns are trained on, even if a truncated sequence contains them, too.
    whole = sum(len(turns[0]) for _, max_tokens in plan if max_tokens is None)
    kept = [s for s in episode.sequences if not s.excluded]
    assert sum(sequence.sampled_tokens for sequence in kept) == whole


def build_group(episode: Trajectory) -> TrajectoryGroup:
    """Return a group of the episode and an episode with another reward and no sampled token."""
    other = Trajectory(
        "task", token_ids=[1], loss_mask=[0], rollout_log_probs=[0.0], reward=episode.reward - 1
    )  # type: ignore[arg-type]
    return TrajectoryGroup("task", [episode, other])


def test_episode_limit_masks_all_sequences(tiny: Harmony) -> None:
    """The episode has the reward of a truncated episode, whatever its conversations contain."""
    limits = LIMITS.model_copy(update={"truncated_episodes": "mask", "max_turns": 2})
    plan = [(None, None), (None, None), (None, None)]
    episode = play_turns(tiny, "planned", [says(tiny, "Hello")] * 2, limits, plan=plan)
    assert episode.finish_reason is FinishReason.MAX_TURNS
    assert [sequence.excluded for sequence in episode.sequences] == [True, True]


@pytest.mark.parametrize("name", ["hanging", "sleeping"])
def test_episode_ends_at_its_time_limit_even_if_the_agent_hangs(
    tiny: Harmony, name: str, tmp_path: Path
) -> None:
    limits = LIMITS.model_copy(update={"max_episode_seconds": 3.0})
    file = tmp_path / "process"

    async def run() -> None:
        async with running(tiny, ScriptedEngine([says(tiny, "Hello")] * 2), limits) as runner:
            episode = await play(runner, name, file=str(file))
            assert episode.invalid is None
            assert episode.finish_reason is FinishReason.TIMEOUT
            assert episode.reward == -1.0
            if name == "hanging":
                # A thread cannot be ended, so the process is killed.
                pid = int(file.read_text())
                await wait_until_async(lambda: not psutil.pid_exists(pid))

    asyncio.run(run())


# ---- weight syncs, concurrency, the end


class SyncedEngine:
    """Engine that aborts every request once in its middle, like a weight sync."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer
        self.version = 0
        self.running = 0
        self.most_running = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.on_begin is not None:
            request.on_begin()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.2)
        self.running -= 1

        done = int(request.request_id.rsplit("/", 1)[1])
        self.version += 1
        engine = ScriptedEngine([self.answer[done:]], aborts=[2] if done == 0 else [])
        engine.requests = [request] * self.version  # its version is the number of requests
        return await engine.generate(request)

    async def abort(self, request_id: str | None = None) -> None: ...


def test_many_episodes_share_a_process_across_a_weight_sync(tiny: Harmony) -> None:
    async def run() -> None:
        engine = SyncedEngine(says(tiny, "Hello"))
        async with running(tiny, engine) as runner:
            episodes = await asyncio.gather(
                *(play(runner, "plain", seed=seed) for seed in range(12))
            )
            children = psutil.Process().children()
            hosts = [c for c in children if "rl_loop.agents.host" in read_command(c)]
            assert len(hosts) == 1
        for episode in episodes:
            assert episode.invalid is None, episode.invalid
            assert episode.reward == 1.0
            assert len({span.version for span in episode.weight_versions}) == 2
            # The prompt and the first of two tokens. The second token was not an input yet.
            assert episode.recomputed_tokens == episode.weight_versions[0].start + 1
            episode.validate()
        assert engine.most_running > 1
        assert not hosts[0].is_running()

    asyncio.run(run())


def test_agent_process_ends_with_its_worker(tiny: Harmony) -> None:
    """The system closes the input of the process, however the worker ends."""

    async def run() -> None:
        async with running(tiny, ScriptedEngine([says(tiny, "Hello")])) as runner:
            await play(runner, "plain")
            [process] = runner.processes._all
            assert process._process is not None and process._process.stdin is not None
            pid = process._process.pid
            process._process.stdin.close()
            await wait_until_async(lambda: not psutil.pid_exists(pid))
            assert os.getpid() != pid

    asyncio.run(run())


def test_openai_sdk_agents_run_an_episode_with_tools_and_handoff(
    tiny: Harmony,
) -> None:
    """The agents of examples/sdk_agents.py run in a separate process."""
    agent = "examples.sdk_agents"
    options = BlackBoxOptions(agent=f"{agent}:run", tasks=f"{agent}:tasks", memory_gb=4)
    task = BlackBoxEnvironment.generate("train", 0, 0, options).metadata["record"]
    _, _, count, item, _ = task["prompt"].split()
    price = task["total"] // int(count)

    turns = [
        calls(tiny, "transfer_to_clerk"),
        calls(tiny, "price", item=item.removesuffix("s")),
        calls(tiny, "total", price=price, count=int(count)),
        says(tiny, str(task["total"])),
    ]
    limits = LIMITS.model_copy(update={"max_episode_tokens": 4000})

    async def run() -> Trajectory:
        async with running(tiny, ScriptedEngine(turns), limits) as runner:
            return await play_task(runner, options, task)

    episode = asyncio.run(run())
    assert episode.invalid is None, episode.invalid
    assert episode.reward == 1.0
    # The clerk and the desk have different instructions and tools, so their sequences differ.
    desk, clerk = episode.sequences
    assert [turn.role for turn in desk.turns] == ["prompt", "assistant"]
    heard = [turn.text for turn in clerk.turns if turn.role == "tool"]
    assert [str(price) in heard[0], str(task["total"]) in heard[1]] == [True, True]
    sampled = [s.token_ids[s.loss_mask].tolist() for s in (desk, clerk)]
    assert sampled == [turns[0], [token for turn in turns[1:] for token in turn]]


def test_agent_runs_in_an_interpreter_without_this_project(
    tiny: Harmony, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base interpreter of this virtual environment has no torch, aiohttp or openai."""
    agent = """
import json, sys, urllib.request

def run(task, base_url, api_key):
    try:
        import torch
    except ImportError:
        pass
    else:
        raise RuntimeError("torch is here")
    body = json.dumps({"model": "x", "messages": [{"role": "user", "content": task["prompt"]}]})
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body.encode(), headers)
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    return float(said == task["answer"])
"""
    (tmp_path / "far_away_agent.py").write_text(agent)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = f"{sys.base_prefix}/bin/python3"
    options = BlackBoxOptions(agent="far_away_agent:run", python=python)

    async def run() -> Trajectory:
        async with running(tiny, ScriptedEngine([says(tiny, "Hello")])) as runner:
            return await play_task(runner, options, {"prompt": "Hi", "answer": "Hello"})

    episode = asyncio.run(run())
    assert episode.invalid is None, episode.invalid
    assert episode.reward == 1.0
    with pytest.raises(ValueError, match="/nowhere/python is not executable"):
        BlackBoxOptions(agent="far_away_agent:run", python="/nowhere/python")


@pytest.mark.hub
def test_verifiers_environment_runs_as_an_agent(
    tiny: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real package runs in a separate environment, with this test's taskset and harness."""
    root = Path(__file__).parents[3]
    python = root / ".cache/hub/verifiers/bin/python"
    if not python.exists():
        pytest.skip("make hub-environments makes an environment with verifiers")
    monkeypatch.setenv("PYTHONPATH", str(root / "tests/support/rl_loop/agents"))
    options = BlackBoxOptions(agent="rl_loop.agents.verifiers_env:run", python=str(python))
    agent = {"harness": {"id": "verifiers_sums"}, "runtime": {"type": "subprocess"}}
    env = {"taskset": {"id": "verifiers_sums"}, "agent": agent}

    async def run() -> list[Trajectory]:
        turns = [says(tiny, "2"), says(tiny, "2")] + [says(tiny, "4")] * 3 + [says(tiny, "2")] * 2
        async with running(tiny, ScriptedEngine(turns)) as runner:

            async def play_index(index: int) -> Trajectory:
                row = {"prompt": "sum", "env": env, "index": index}
                return await play_task(runner, options, row, seed=10 * len(episodes) + index)

            episodes: list[Trajectory] = []
            for index in (1, 2, 3, 9):
                episodes.append(await play_index(index))
            # Two concurrent episodes have the keys of two sessions.
            return episodes + await asyncio.gather(play_index(1), play_index(2))

    right, wrong, broken, missing, *both = asyncio.run(run())
    assert [episode.reward_parts["score"] for episode in both] == [1.0, 0.25]
    for number, episode in enumerate(both, 1):
        assert f"What is {number} + 1?" in episode.turns[0].text
    assert missing.invalid is not None
    assert "verifiers_sums has no task 9" in missing.invalid.reason
    assert right.invalid is None, right.invalid
    assert (right.reward_parts["score"], wrong.reward_parts["score"]) == (1.0, 0.25)
    assert tiny.decode(right.token_ids[right.loss_mask].tolist()) == tiny.decode(says(tiny, "2"))
    assert "What is 1 + 1?" in right.turns[0].text
    assert broken.invalid is not None
    assert "the scorer is out of order" in broken.invalid.reason
