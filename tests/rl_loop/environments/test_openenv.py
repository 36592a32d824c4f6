"""Environments of OpenEnv: the real package's server (marker hub), and its protocol."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rl_loop.cluster.placement import free_port
from rl_loop.config.episode import EpisodeLimits
from rl_loop.config.tasks import SourceConfig
from rl_loop.data.trajectory import Trajectory
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments import RewardConfig, Task
from rl_loop.environments.openenv import OpenEnvEnvironment, OpenEnvOptions, OpenEnvSession
from rl_loop.harmony.codec import Harmony, ParsedMessage, PromptConfig
from rl_loop.harmony.vocabulary import GptOssVocabulary
from rl_loop.infrastructure import InfrastructureError
from rl_loop.rollout import agent
from rl_loop.rollout.agent import run_episode
from tests.support.rl_loop.environments.guessing_server import CUT, FAR, ONCE, RULES, SLOW
from tests.support.rl_loop.scripted_engine import ScriptedEngine
from tests.support.waiting import PATIENCE_SECONDS, wait_until

ROOT = Path(__file__).parents[3]
SERVER = ROOT / "tests/support/rl_loop/environments/guessing_server.py"
PYTHON = {"wire": Path(sys.executable), "openenv": ROOT / ".cache/hub/openenv/bin/python"}
LIMITS = EpisodeLimits(max_turns=8, max_episode_tokens=4000, max_episode_seconds=60)
SEED = 7
"""Seed of all tasks, and the number to guess."""


class Served:
    """Server that can be restarted at the same address."""

    def __init__(self, way: str, trace: Path, interface: str = "step") -> None:
        self.way = way
        # No other process gets this port while the server is down.
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.trace = trace
        """File whose absence enables the faults that happen once."""
        self._command = [PYTHON[way], SERVER, str(self.port), way, interface]
        self.start()

    def start(self) -> None:
        environment = os.environ | {"TRACE": str(self.trace)}
        self.process = subprocess.Popen(self._command, env=environment, stderr=subprocess.DEVNULL)
        wait_until(self._listens)

    def _listens(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


WAYS = ["wire", pytest.param("openenv", marks=pytest.mark.hub)]


@pytest.fixture(scope="module", params=WAYS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    yield from serve(request.param, tmp_path_factory.mktemp("trace") / "happened")


@pytest.fixture(scope="module", params=WAYS)
def served_tools(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    yield from serve(request.param, tmp_path_factory.mktemp("trace") / "happened", "tools")


def serve(way: str, trace: Path, interface: str = "step") -> Iterator[Served]:
    if not PYTHON[way].exists():
        pytest.skip("make hub-environments makes an environment with openenv")
    server = Served(way, trace, interface)
    yield server
    server.end()


@pytest.fixture(scope="module")
def harmony() -> Harmony:
    return Harmony(GptOssVocabulary(), PromptConfig())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "TOOL_RETRY_DELAYS", (0.0, 0.0, 0.0))


def make_task(url: str, **options: Any) -> Task:
    checked = OpenEnvOptions.model_validate({"url": url, **options})
    row = {"prompt": "Find my number.", "reset": {"seed": SEED}}
    return OpenEnvEnvironment.from_record(row, "t", checked)


def build_environment(task: Task) -> OpenEnvEnvironment:
    return OpenEnvEnvironment(task, None, RewardConfig())  # type: ignore[arg-type]


def guess(harmony: Harmony, number: object, name: str = "step", key: str = "number") -> list[int]:
    return call(harmony, name, **{key: number})


def call(harmony: Harmony, name: str, **arguments: object) -> list[int]:
    text = json.dumps(arguments)
    message = ParsedMessage("commentary", f"functions.{name}", "<|constrain|>json", text)
    return harmony.render_assistant([message], "<|call|>")


def said(harmony: Harmony, text: str) -> list[int]:
    return harmony.render_assistant([ParsedMessage("final", None, None, text)], "<|return|>")


def play(harmony: Harmony, task: Task, *turns: list[int]) -> Trajectory:
    engine = ScriptedEngine(turns)
    environment = build_environment(task)
    return asyncio.run(
        run_episode("t", environment, engine, harmony, LIMITS, SamplingParams(500), seed=1)
    )


def heard(trajectory: Trajectory, role: str = "tool") -> list[str]:
    return [
        turn.text.split("<|message|>")[1].split("<|end|>")[0]
        for turn in trajectory.turns
        if turn.role == role
    ]


def test_step_game_has_the_reward_of_its_steps(harmony: Harmony, served: Served) -> None:
    trajectory = play(
        harmony,
        make_task(served.url),
        guess(harmony, 3),
        guess(harmony, -1),
        guess(harmony, 7, key="figure"),
        guess(harmony, 7),
    )
    low, negative, invalid = heard(trajectory)
    assert (low, negative) == ("higher", "guess 2 is negative")
    assert '"number"' in invalid
    assert (trajectory.tool_calls, trajectory.tool_errors) == (4, 2)
    # The game gives -0.25 and 1. The reward is between -1 (idle) and 1 (perfect game).
    assert trajectory.reward_parts["score"] == 0.75
    assert trajectory.reward == 0.5
    prompt = trajectory.turns[0].text
    assert "type step = (_: {" in prompt
    assert "number: number" in prompt
    assert "metadata" not in prompt
    assert "Find my number.\n\nguess a number" in prompt


def test_last_reward_counts_and_giving_up_ends_the_game(harmony: Harmony, served: Served) -> None:
    task = make_task(served.url, score="last", perfect_score=2.0)
    assert play(harmony, task, guess(harmony, 3), guess(harmony, 7)).reward_parts["score"] == 0.5
    given_up = play(harmony, task, guess(harmony, 3), said(harmony, "I give up"))
    assert given_up.reward_parts["score"] == -0.125
    unknown = play(harmony, task, guess(harmony, 3, name="leap"))
    assert unknown.format_error == "unknown_tool"


def test_text_game_alternates_policy_and_user_messages(harmony: Harmony, served: Served) -> None:
    """The number is a text, which the server parses or rejects like pydantic."""
    task = make_task(served.url, interface="text", text_field="figure")
    trajectory = play(harmony, task, said(harmony, "seven"), said(harmony, "eight"))
    [first] = heard(trajectory, "user")
    assert '"number"' in first
    assert trajectory.tool_calls == 0


def test_game_is_played_with_the_tools_of_its_server(
    harmony: Harmony, served_tools: Served
) -> None:
    served_tools.trace.touch()
    trajectory = play(
        harmony,
        make_task(served_tools.url, interface="tools"),
        guess(harmony, 3, "guess"),
        guess(harmony, -1, "guess"),
        guess(harmony, "seven", "guess"),
        call(harmony, "rules"),
        guess(harmony, 7, "guess"),
    )
    low, negative, invalid, rules = heard(trajectory)
    assert (low, negative) == ("higher", "Error calling tool 'guess': guess 2 is negative")
    assert "number" in invalid
    # The policy also reads the content of a result without structured content.
    assert rules == RULES
    assert (trajectory.tool_calls, trajectory.tool_errors) == (5, 2)
    assert trajectory.reward_parts["score"] == 0.75
    prompt = trajectory.turns[0].text
    assert "type guess = (_: {" in prompt
    assert "number: number" in prompt
    assert "type rules = () => any" in prompt

    unknown = play(harmony, make_task(served_tools.url, interface="tools"), call(harmony, "step"))
    assert unknown.format_error == "unknown_tool"


@pytest.mark.parametrize("replay", [True, False])
def test_unreachable_tool_is_called_again_or_is_infrastructure(
    harmony: Harmony, served_tools: Served, replay: bool
) -> None:
    served_tools.trace.unlink(missing_ok=True)
    trajectory = play(
        harmony,
        make_task(served_tools.url, interface="tools", replay=replay),
        guess(harmony, 3, "guess"),
        call(harmony, "rules"),
        guess(harmony, 7, "guess"),
    )
    assert served_tools.trace.exists(), "it was not out of reach"
    if replay:
        assert trajectory.invalid is None, trajectory.invalid
        assert heard(trajectory) == ["higher", RULES]
        assert (trajectory.tool_errors, trajectory.reward_parts["score"]) == (0, 0.75)
    else:
        assert trajectory.invalid is not None
        assert trajectory.invalid.component == "environment"
        assert trajectory.invalid.failure_source == f"OpenEnv at {served_tools.url}"
        assert f"cannot reach its tools: {FAR}" in trajectory.invalid.reason
        assert math.isnan(trajectory.reward)


def test_openenv_server_without_tools_is_named(harmony: Harmony, served: Served) -> None:
    trajectory = play(harmony, make_task(served.url, interface="tools"), call(harmony, "guess"))
    assert trajectory.invalid is not None
    assert trajectory.invalid.reason.startswith(f"OpenEnv at {served.url} lists no tools: [")


@pytest.mark.hub
@pytest.mark.parametrize("interface", ["step", "tools"])
def test_mock_server_messages_equal_those_of_the_package(interface: str, tmp_path: Path) -> None:
    """All messages are compared, except for the package's texts of errors."""
    calls: list[tuple[str, dict[str, object]]] = [
        ("guess", {"number": 3}),
        ("guess", {"number": -1}),
        ("guess", {}),
        ("rules", {}),
        ("rules", {}),
        ("leap", {}),
        ("guess", {"number": 7}),
    ]
    actions: list[dict[str, object]] = [{"number": 3}, {"figure": 3}, {"number": -1}, {"number": 7}]
    if interface == "tools":
        actions = [{"type": "list_tools"}, {"type": "call_tool"}]
        actions += [{"type": "call_tool", "tool_name": n, "arguments": a} for n, a in calls]
    messages = [{"type": "reset", "data": {"seed": SEED}}]
    messages += [{"type": "step", "data": action} for action in actions]

    answers = []
    for way in PYTHON:
        for server in serve(way, tmp_path / way, interface):
            answers.append(asyncio.run(request_answers(server, messages)))
    wire, package = answers
    assert wire == package


async def request_answers(server: Served, messages: list[dict[str, Any]]) -> list[Any]:
    answers = []
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{server.url}/ws") as socket:
        for message in messages:
            await socket.send_json(message)
            answer = json.loads((await socket.receive()).data)
            data = answer["data"]
            if answer["type"] == "error":
                answers.append((data["code"], [error["loc"] for error in data.get("errors", [])]))
                continue
            if error := data["observation"].get("error"):
                error["message"] = ""
            answers.append(data)
    return answers


def test_restarted_server_is_replayed_to_its_state(
    harmony: Harmony, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = OpenEnvSession.open

    async def open_again(self: OpenEnvSession) -> None:
        try:
            await connect(self)
        except InfrastructureError:
            # The sockets close before the process ends, so poll() would still find the process.
            await asyncio.to_thread(served.process.wait, PATIENCE_SECONDS)
            await asyncio.to_thread(served.start)
            await connect(self)

    monkeypatch.setattr(OpenEnvSession, "open", open_again)
    task = make_task(served.url)
    first = served.process.pid
    trajectory = play(harmony, task, guess(harmony, 3), guess(harmony, ONCE), guess(harmony, 7))
    assert served.process.pid != first, "it has not died"
    # The first guess is repeated in the new game, but its reward counts once.
    assert heard(trajectory) == ["higher", "guess 2 is negative"]
    assert trajectory.reward_parts["score"] == 0.75
    assert trajectory.invalid is None


def test_step_that_always_ends_its_session_is_a_policy_error(
    harmony: Harmony, served: Served
) -> None:
    if served.way != "wire":
        pytest.skip("only the mock server cuts connections")
    task = make_task(served.url)
    trajectory = play(harmony, task, guess(harmony, 3), guess(harmony, CUT), guess(harmony, 7))
    assert trajectory.invalid is None
    assert heard(trajectory) == ["higher", "this call ended the server that it was made to"]
    assert trajectory.reward_parts["score"] == 0.75


def test_step_beyond_its_time_limit_is_a_policy_error(harmony: Harmony, served: Served) -> None:
    task = make_task(served.url, step_seconds=1.0)
    trajectory = play(harmony, task, guess(harmony, 3), guess(harmony, SLOW))
    assert trajectory.invalid is None
    assert trajectory.reward_parts["score"] == -0.25


def test_full_or_unreachable_server_is_infrastructure(harmony: Harmony, served: Served) -> None:
    async def begin(session: OpenEnvSession) -> None:
        # The server may still count sessions of other tests.
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    await session.open()
                    await session.reset({})
                    return
                except InfrastructureError:
                    await session.close()
                    await asyncio.sleep(0.1)

    async def fill() -> Trajectory:
        others = [OpenEnvSession(OpenEnvOptions(url=served.url)) for _ in range(2)]
        try:
            for other in others:
                await begin(other)
            return await run_episode(
                "t",
                build_environment(make_task(served.url)),
                ScriptedEngine([guess(harmony, 7)]),
                harmony,
                LIMITS,
                SamplingParams(500),
                seed=1,
            )
        finally:
            for other in others:
                await other.close()

    full = asyncio.run(fill())
    assert full.invalid is not None
    assert full.invalid.component == "environment"
    assert "CAPACITY_REACHED" in full.invalid.reason

    away = play(harmony, make_task("http://127.0.0.1:9"), guess(harmony, 7))
    assert away.invalid is not None
    assert "OpenEnv at http://127.0.0.1:9 cannot be reached" in away.invalid.reason


def test_tasks_have_unique_numbers_and_seeds() -> None:
    options = OpenEnvOptions(url="ws://127.0.0.1:9", prompt="Game {number}.")
    tasks = [
        OpenEnvEnvironment.generate(split, 3, index, options)  # type: ignore[arg-type]
        for split in ("train", "held_out")
        for index in range(50)
    ]
    assert len({task.messages[0]["content"] for task in tasks}) == 100
    assert len({task.metadata["record"]["reset"]["seed"] for task in tasks}) == 100
    for options_given, match in [
        ({"url": "127.0.0.1:9"}, "String should match pattern"),
        ({"url": "http://x", "prompt": "Play."}, "prompt needs {number}"),
    ]:
        with pytest.raises(ValueError, match=match):
            SourceConfig(environment="openenv", options=options_given)


@pytest.mark.parametrize(
    ("seed", "what"),
    [
        (2, "number': 3} gave a different result"),
        (12, "returned another observation at a second reset"),
    ],
)
def test_game_with_another_replay_is_an_infrastructure_failure(
    served: Served, seed: int, what: str
) -> None:
    async def run() -> None:
        environment = build_environment(make_task(served.url))
        await environment.open()
        try:
            await environment.call("functions.step", '{"number": 3}')
            environment.restore_state(environment.save_state())
            # Another seed simulates a server whose game differs under the same seed.
            environment.row["reset"] = {"seed": seed}
            await environment.call("functions.step", '{"number": 3}')
        finally:
            await environment.close()

    with pytest.raises(InfrastructureError, match=what):
        asyncio.run(run())
