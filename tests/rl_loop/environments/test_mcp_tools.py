"""Tools of real MCP servers: in process, over stdio and by HTTP.

The policy sees errors of tools. Failures of servers give no reward.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp.types import INTERNAL_ERROR, INVALID_PARAMS

from rl_loop.cluster.placement import free_port
from rl_loop.config.episode import EpisodeLimits
from rl_loop.config.tasks import SourceConfig
from rl_loop.data.trajectory import Trajectory
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments import RewardConfig, Task, environment_class
from rl_loop.environments.mcp_tools import McpEnvironment, McpOptions
from rl_loop.environments.tool_servers.config import ToolServerConfig
from rl_loop.environments.tool_servers.toolbox import ToolBox, offered_without_episode
from rl_loop.harmony.codec import Harmony, ParsedMessage, PromptConfig, Tool
from rl_loop.harmony.vocabulary import GptOssVocabulary
from rl_loop.infrastructure import InfrastructureError
from rl_loop.rollout import agent
from rl_loop.rollout.agent import run_episode
from tests.support.forked_workers import forked_python
from tests.support.forked_workers.ask_for_fork import ADDRESS
from tests.support.rl_loop.environments.ledger_server import REFUSED
from tests.support.rl_loop.scripted_engine import ScriptedEngine
from tests.support.waiting import wait_until

LEDGER = "tests.support.rl_loop.environments.ledger_server"
SERVER = Path(__file__).parents[3] / "tests/support/rl_loop/environments/ledger_server.py"
IN_PROCESS = {"in_process": f"{LEDGER}:make"}
STDIO = {"command": [sys.executable, str(SERVER)], "cwd": str(SERVER.parents[3])}
LIMITS = EpisodeLimits(max_turns=8, max_episode_tokens=8000, max_episode_seconds=60)


@pytest.fixture(scope="module")
def harmony() -> Harmony:
    return Harmony(GptOssVocabulary(), PromptConfig())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "TOOL_RETRY_DELAYS", (0.0, 0.0, 0.0))


@pytest.fixture
def forked() -> dict[str, Any]:
    """Return STDIO in a fork, for tests that do not observe the process.

    A new interpreter spends 0.8 s of processor time on imports.
    """
    command = [*forked_python(), str(SERVER)]
    environment = {name: os.environ[name] for name in (ADDRESS,) if name in os.environ}
    return {**STDIO, "command": command, "env": environment}


@contextmanager
def http_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server with streamable HTTP on loopback. Yield its URL and its process."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL, cwd=SERVER.parents[3]
    )
    try:
        wait_until(lambda: _listens(port))
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def make_task(servers: dict[str, Any], record: dict[str, Any] | None = None, **more: Any) -> Task:
    options = McpOptions.model_validate({"servers": servers, **more})
    return McpEnvironment.from_record(
        {"prompt": "How much is in it?", "answer": "7", **(record or {})}, "t", options
    )


def build_environment(task: Task) -> McpEnvironment:
    async def execute(*_: object) -> Any:
        raise AssertionError

    return McpEnvironment(task, execute, RewardConfig(correct=1.0, wrong=-1.0))


def call(harmony: Harmony, name: str, **arguments: Any) -> list[int]:
    text = json.dumps(arguments)
    message = ParsedMessage("commentary", f"functions.{name}", "<|constrain|>json", text)
    return harmony.render_assistant([message], "<|call|>")


def final(harmony: Harmony, text: str) -> list[int]:
    return harmony.render_assistant([ParsedMessage("final", None, None, text)], "<|return|>")


def play(harmony: Harmony, task: Task, *turns: list[int], **limits: Any) -> Trajectory:
    """Return the episode of a scripted policy."""
    return asyncio.run(episode(harmony, task, turns, LIMITS.model_copy(update=limits)))


async def episode(
    harmony: Harmony, task: Task, turns: Sequence[list[int]], limits: EpisodeLimits
) -> Trajectory:
    environment = build_environment(task)
    engine = ScriptedEngine(turns)
    sampling = SamplingParams(2000)
    return await run_episode("t", environment, engine, harmony, limits, sampling, seed=1)


def read(trajectory: Trajectory) -> list[str]:
    """Return the texts of all tool messages of an episode."""
    return [
        turn.text.split("<|message|>")[1].split("<|end|>")[0]
        for turn in trajectory.turns
        if turn.role == "tool"
    ]


# ---- the three ways to reach a server


def test_in_process_server_serves_an_episode(harmony: Harmony) -> None:
    task = make_task({"bank": IN_PROCESS}, {"opening": 3})
    trajectory = play(
        harmony,
        task,
        call(harmony, "deposit", amount=4),
        call(harmony, "balance"),
        final(harmony, "7"),
    )
    assert read(trajectory) == ["7 in it", "7"]
    assert (trajectory.reward, trajectory.tool_calls, trajectory.tool_errors) == (1.0, 2, 0)
    described = trajectory.turns[0].text
    assert "namespace functions" in described
    assert "type deposit = (_: {" in described
    assert "amount: number" in described


def test_stdio_server_belongs_to_one_episode_and_ends_with_it(
    harmony: Harmony,
) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    task = make_task({"bank": STDIO})
    for _ in range(2):
        trajectory = play(harmony, task, call(harmony, "deposit", amount=7), final(harmony, "7"))
        # The second episode does not see the deposit of the first.
        assert read(trajectory) == ["7 in it"]
        assert trajectory.reward == 1.0
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_http_server_serves_an_episode_and_its_death_is_invalid(
    harmony: Harmony,
) -> None:
    with http_server() as (url, process):
        task = make_task({"bank": {"url": url, "headers": {"X-Team": "a"}}})
        trajectory = play(
            harmony, task, call(harmony, "transfer", order={"to": "me"}), final(harmony, "7")
        )
        assert read(trajectory) == ["1 to me"]
        process.kill()
        process.wait()
        lost = play(harmony, task, call(harmony, "balance"), final(harmony, "7"))
    assert lost.invalid is not None
    assert lost.invalid.component == "tool"
    assert "tool server bank cannot be reached" in lost.invalid.reason
    assert math.isnan(lost.reward)


# ---- errors of tools, failures of servers


def test_tool_errors_of_the_policy_are_shown_to_it(harmony: Harmony) -> None:
    task = make_task({"bank": IN_PROCESS})
    broken = ParsedMessage("commentary", "functions.deposit", "<|constrain|>json", "{amount")
    trajectory = play(
        harmony,
        task,
        call(harmony, "deposit", amount=-1),
        call(harmony, "deposit", amount="much"),
        harmony.render_assistant([broken], "<|call|>"),
        call(harmony, "balance"),
        final(harmony, "8"),
    )
    refused, not_a_number, not_json, balance = read(trajectory)
    assert refused == "Error executing tool deposit"
    assert "valid integer" in not_a_number
    assert not_json.startswith("the arguments are not JSON")
    # The failed calls have not changed the balance.
    assert balance == "0"
    assert (trajectory.tool_calls, trajectory.tool_errors, trajectory.reward) == (4, 3, -1.0)
    assert trajectory.invalid is None


def test_only_invalid_argument_errors_are_the_policys_errors(
    harmony: Harmony,
) -> None:
    REFUSED.clear()
    task = make_task({"bank": IN_PROCESS})
    trajectory = play(
        harmony, task, call(harmony, "refuse", code=INVALID_PARAMS), final(harmony, "7")
    )
    assert read(trajectory) == ["refuse: no such account"]
    assert (trajectory.tool_errors, trajectory.reward) == (1, 1.0)
    assert REFUSED == [INVALID_PARAMS]

    failed = play(harmony, task, call(harmony, "refuse", code=INTERNAL_ERROR), final(harmony, "7"))
    assert failed.invalid is not None
    assert (failed.invalid.component, failed.invalid.failure_source) == ("tool", "tool server bank")
    assert "failed in a call of refuse: MCPError: no such account" in failed.invalid.reason
    assert math.isnan(failed.reward)
    # The call was repeated after each pause before the episode failed.
    assert REFUSED[1:] == [INTERNAL_ERROR] * (1 + len(agent.TOOL_RETRY_DELAYS))


def test_call_of_a_tool_that_is_not_offered_is_a_format_error(harmony: Harmony) -> None:
    task = make_task({"bank": IN_PROCESS | {"tools": ["balance"]}})
    trajectory = play(harmony, task, call(harmony, "deposit", amount=1))
    assert trajectory.format_error == "unknown_tool"
    assert "deposit" not in trajectory.turns[0].text


def test_server_that_dies_in_a_call_is_replaced_and_replayed(
    harmony: Harmony, tmp_path: Path, forked: dict[str, Any]
) -> None:
    task = make_task({"bank": forked}, {"answer": "105"})
    trajectory = play(
        harmony,
        task,
        call(harmony, "deposit", amount=5),
        call(harmony, "die_once", trace=str(tmp_path / "trace")),
        final(harmony, "105"),
    )
    assert (tmp_path / "trace").exists(), "it has not died"
    # 5 of the first turn and 100 once, although the server added 100 before it died, too.
    assert read(trajectory) == ["5 in it", "alive with 105"]
    assert trajectory.reward == 1.0
    assert trajectory.invalid is None


def test_call_that_always_kills_its_server_is_a_policy_error(
    harmony: Harmony, forked: dict[str, Any]
) -> None:
    task = make_task({"bank": forked}, {"answer": "7"})
    trajectory = play(
        harmony,
        task,
        call(harmony, "deposit", amount=5),
        call(harmony, "die"),
        call(harmony, "balance"),
        final(harmony, "7"),
    )
    assert trajectory.invalid is None
    assert read(trajectory) == ["5 in it", "this call ended the server that it was made to", "5"]
    assert (trajectory.tool_errors, trajectory.reward) == (1, 1.0)


ODD_ARGUMENTS = [
    r'{"amount": 1, "memo": "\ud800"}',
    '{"amount": NaN}',
    '{"amount": 1e999}',
    '{"amount": ' + "[" * 300 + "]" * 300 + "}",
    '{"amount": ' + "9" * 4000 + "}",
    r'{"amount": "\u0000"}',
    '{"amount": true, "amount": null}',
    '{"": {"__proto__": []}}',
]


def test_any_tool_arguments_leave_the_episode_valid(
    harmony: Harmony, forked: dict[str, Any]
) -> None:
    """The JSON encoder of the transport has limits that Python's encoder does not have."""
    turns = []
    for arguments in ODD_ARGUMENTS:
        message = ParsedMessage("commentary", "functions.deposit", "<|constrain|>json", arguments)
        turns.append(harmony.render_assistant([message], "<|call|>"))
    task = make_task({"bank": forked})
    limits = {"max_turns": len(turns) + 1, "max_episode_tokens": 100_000}
    trajectory = play(harmony, task, *turns, final(harmony, "7"), **limits)
    assert trajectory.invalid is None, trajectory.invalid
    assert len(read(trajectory)) == len(turns)


def test_failed_call_is_not_repeated_without_replay(
    harmony: Harmony, tmp_path: Path, forked: dict[str, Any]
) -> None:
    task = make_task({"bank": forked}, replay=False)
    trajectory = play(
        harmony, task, call(harmony, "die_once", trace=str(tmp_path / "trace")), final(harmony, "")
    )
    assert trajectory.invalid is not None
    assert "tool server bank" in trajectory.invalid.reason


def test_replay_with_another_result_is_an_infrastructure_failure() -> None:
    async def run() -> None:
        environment = build_environment(make_task({"bank": IN_PROCESS}))
        await environment.open()
        try:
            await environment.call("functions.clock", "{}")
            environment.restore_state(environment.save_state())
            await environment.call("functions.balance", "{}")
        finally:
            await environment.close()

    with pytest.raises(InfrastructureError, match=r"tool='clock'.*gave a different result"):
        asyncio.run(run())


def test_server_that_does_not_start_is_named(harmony: Harmony) -> None:
    missing = {"command": ["/nowhere/server"]}
    task = make_task({"bank": IN_PROCESS, "lost": missing})
    trajectory = play(harmony, task, final(harmony, "7"))
    assert trajectory.invalid is not None
    assert trajectory.invalid.reason.startswith("tool server lost cannot be reached")
    assert "No such file" in trajectory.invalid.reason


def test_silent_server_fails_at_its_time_limit(
    harmony: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One attempt, because closing such a server takes 2 s.
    monkeypatch.setattr(agent, "TOOL_RETRY_DELAYS", ())
    silent = {
        "command": [sys.executable, "-c", "import time; time.sleep(60)"],
        "connect_seconds": 0.5,
    }
    began = time.monotonic()
    trajectory = play(harmony, make_task({"mute": silent}), final(harmony, "7"))
    assert trajectory.invalid is not None
    assert "tool server mute was not ready within 0.5 s" in trajectory.invalid.reason
    assert time.monotonic() - began < 60


# ---- bounds


def test_tool_call_is_limited_in_time_and_size(harmony: Harmony) -> None:
    bounded = {
        "slow": IN_PROCESS | {"call_seconds": 0.3, "tools": ["wait"], "prefix": "slow_"},
        "bank": IN_PROCESS | {"max_output_bytes": 40},
    }
    task = make_task(bounded)
    trajectory = play(
        harmony,
        task,
        call(harmony, "slow_wait", seconds=3),
        call(harmony, "repeat", text="ab", times=1000),
        call(harmony, "picture"),
        final(harmony, "7"),
    )
    late, long, picture = read(trajectory)
    assert late == "wait did not answer within 0.3 s"
    assert long == "abababababababababab\n[1960 characters left out]\nabababababababababab"
    assert picture == "[image/png: cannot be shown]"
    # The policy requested too much text, which is not an infrastructure failure.
    assert trajectory.invalid is None
    assert trajectory.tool_errors == 1


def test_restart_of_a_server_does_not_count_as_episode_time(
    harmony: Harmony, tmp_path: Path, forked: dict[str, Any]
) -> None:
    """The restart takes longer than the time limit of the episode."""
    trace = tmp_path / "trace"
    start = f"test -e {trace} && sleep 2; exec {shlex.join(forked['command'])}"
    slow = {**forked, "command": ["sh", "-c", start]}
    task = make_task({"bank": slow}, {"answer": "100"})
    trajectory = play(
        harmony,
        task,
        call(harmony, "die_once", trace=str(trace)),
        final(harmony, "100"),
        max_episode_seconds=1.5,
    )
    assert read(trajectory) == ["alive with 100"]
    assert trajectory.reward == 1.0


# ---- names, schemas, options


def test_tools_of_equal_name_are_rejected_without_a_prefix() -> None:
    servers = {"bank": IN_PROCESS, "shop": {"in_process": f"{LEDGER}:other"}}
    with pytest.raises(ValueError, match="bank and shop both have a tool 'balance'"):
        _offered(servers)
    names = {
        tool.name for tool in _offered({**servers, "shop": servers["shop"] | {"prefix": "s_"}})
    }
    assert {"balance", "s_balance", "deposit"} <= names


def test_invalid_or_missing_tool_names_are_rejected() -> None:
    with pytest.raises(ValueError, match="'to/do' is not a valid name of a tool"):
        _offered({"bad": {"in_process": f"{LEDGER}:badly_named"}})
    with pytest.raises(
        ValueError, match=r"tool server bank has no tool 'fly'\. Its tools: deposit"
    ):
        _offered({"bank": IN_PROCESS | {"tools": ["fly"]}})


def _offered(servers: dict[str, Any]) -> list[Tool]:
    checked = {name: ToolServerConfig.model_validate(values) for name, values in servers.items()}
    return offered_without_episode(checked, {})


def test_pydantic_schemas_are_rendered_with_their_types(harmony: Harmony) -> None:
    offered = {tool.name: tool for tool in _offered({"bank": IN_PROCESS})}
    prompt = harmony.decode(
        harmony.render_prompt([{"role": "user", "content": "x"}], [offered["transfer"]])
    )
    [described] = prompt.split("type transfer = (_: {")[1:]
    shown = described.split("}) => any")[0]
    assert "any" not in shown
    assert "to: string" in shown
    assert "amount?: number" in shown
    assert "memo?: string | null" in shown


def test_invalid_options_are_rejected_by_the_configuration() -> None:
    def refused(match: str, **server: Any) -> None:
        with pytest.raises(ValueError, match=match):
            SourceConfig(environment="mcp", options={"servers": {"bank": server}})

    refused("needs one of command, url, in_process, but has none")
    refused("but has command and url", command=["x"], url="http://x")
    refused("headers need a url", command=["x"], headers={"a": "b"})
    refused("env and cwd need a command", url="http://x", cwd="/")
    refused("tool server 'nowhere:make' cannot be imported", in_process="nowhere:make")
    with pytest.raises(ValueError, match="correct, format_error, score are parts of every episode"):
        SourceConfig(
            environment="mcp", options={"servers": {"bank": IN_PROCESS}, "parts": ["score"]}
        )


# ---- judging, setting up, sharing


async def ledger_judge(row: dict[str, Any], answer: str, tools: ToolBox) -> dict[str, float]:
    """Judge the balance on the server, not the answer of the policy."""
    balance = await tools.call("balance", {})
    return {"score": float(balance.text == row["answer"]), "said": float(answer == balance.text)}


def test_judge_reads_the_state_of_the_servers(harmony: Harmony) -> None:
    task = make_task(
        {"bank": IN_PROCESS | {"tools": ["deposit", "open_with"]}},
        {"setup": {"amount": 3}},
        judge=f"{__name__}:ledger_judge",
        parts=["said"],
        setup_tool="open_with",
    )
    trajectory = play(
        harmony, task, call(harmony, "deposit", amount=4), final(harmony, "I think 9")
    )
    # The setup sets the balance to 3. The judge has the tool ``balance``, the policy has not.
    assert trajectory.reward == 1.0
    assert trajectory.reward_parts["said"] == 0.0
    assert "balance" not in trajectory.turns[0].text
    assert "open_with" not in trajectory.turns[0].text
    unfinished = build_environment(task).end_truncated()
    assert unfinished.reward_parts["said"] == 0.0
    cheating = play(harmony, task, call(harmony, "open_with", amount=7))
    assert cheating.format_error == "unknown_tool"


@pytest.mark.parametrize(
    ("options", "setup", "component", "reason"),
    [
        ({"setup_tool": "open_with"}, {"amount": "much"}, "tool", "setup_tool open_with: "),
        (
            {"setup_tool": "open_with"},
            3,
            "environment",
            "the arguments of open_with must be a JSON object, not int",
        ),
        ({"setup_tool": "fly"}, {}, "tool", "the tool servers have no tool 'fly'"),
        ({"twice": True}, {}, "tool", "tool servers bank and shop both have a tool 'balance'"),
    ],
)
def test_failed_setup_of_an_episode_is_infrastructure(
    harmony: Harmony, options: dict[str, Any], setup: object, component: str, reason: str
) -> None:
    servers = {"bank": IN_PROCESS}
    if options.pop("twice", False):
        servers["shop"] = {"in_process": f"{LEDGER}:other"}
    task = make_task(servers, {"setup": setup}, **options)
    trajectory = play(harmony, task, final(harmony, "7"))
    assert trajectory.invalid is not None
    assert trajectory.invalid.component == component
    assert trajectory.invalid.reason.startswith(reason)
    assert math.isnan(trajectory.reward)


def test_purification_and_retries_restore_the_servers() -> None:
    """Actions after a saved state are undone, although a server cannot undo an action."""

    async def run() -> None:
        environment = build_environment(make_task({"bank": IN_PROCESS}))
        await environment.open()
        try:
            await environment.call("functions.deposit", '{"amount": 5}')
            state = environment.save_state()
            await environment.call("functions.deposit", '{"amount": 50}')
            assert await environment.call("functions.balance", "{}") == "55"
            environment.restore_state(state)
            assert await environment.call("functions.balance", "{}") == "5"
            environment.restore_state(state)
            assert await environment.call("functions.deposit", '{"amount": 1}') == "6 in it"
        finally:
            await environment.close()

    asyncio.run(run())


def test_shared_server_serves_all_episodes_and_is_reopened(
    harmony: Harmony, tmp_path: Path, forked: dict[str, Any]
) -> None:
    task = make_task({"bank": forked | {"shared": True}}, {"answer": "101"})

    dies = call(harmony, "die_once", trace=str(tmp_path / "trace"))

    async def both() -> list[Trajectory]:
        # Two episodes in sequence on one event loop.
        return [
            await episode(
                harmony, task, [call(harmony, "deposit", amount=1), final(harmony, "")], LIMITS
            ),
            await episode(
                harmony,
                task,
                [call(harmony, "deposit", amount=2), dies, final(harmony, "")],
                LIMITS,
            ),
        ]

    first, second = asyncio.run(both())
    assert read(first) == ["1 in it"]
    # The second episode uses the server of the first. A new server would start with 0.
    assert read(second) == ["3 in it", "alive with 100"]


def test_custom_mcp_class_needs_only_its_tasks(harmony: Harmony) -> None:
    name = f"{__name__}:BankEnvironment"
    assert environment_class(name) is not None
    source = SourceConfig(environment=name, options={"servers": {"bank": IN_PROCESS}})
    options = BankEnvironment.Options.model_validate(source.options)
    task = BankEnvironment.generate("train", 0, 4, options)

    async def run() -> float:
        environment = BankEnvironment(task, None, RewardConfig())  # type: ignore[arg-type]
        await environment.open()
        try:
            await environment.call("functions.deposit", '{"amount": 4}')
            return (await environment.answer("whatever")).reward
        finally:
            await environment.close()

    assert asyncio.run(run()) == 1.0


class BankEnvironment(McpEnvironment):
    @classmethod
    def generate(cls, split: Any, seed: int, index: int, options: Any) -> Task:
        return cls.from_record({"prompt": f"Put {index} in.", "want": index}, str(index), options)

    async def judge(self, answer: str, tools: ToolBox) -> float:
        balance = await tools.call("balance", {})
        return float(balance.text == str(self.task.metadata["record"]["want"]))


def test_failure_to_close_an_environment_keeps_its_episode(
    harmony: Harmony, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def close(self: McpEnvironment) -> None:
        await self.disconnect()
        raise RuntimeError("it stays open")

    monkeypatch.setattr(McpEnvironment, "close", close)
    trajectory = play(harmony, make_task({"bank": IN_PROCESS}), final(harmony, "7"))
    assert trajectory.reward == 1.0
    assert "McpEnvironment.close() failed for task t: RuntimeError: it stays open" in caplog.text


def test_task_without_an_answer_raises_an_error() -> None:
    with pytest.raises(KeyError, match="answer"):
        McpEnvironment.from_record(
            {"prompt": "?"}, "t", McpOptions.model_validate({"servers": {"bank": IN_PROCESS}})
        )
    with pytest.raises(ValueError, match="its metadata has no record"):
        build_environment(Task("t", [{"role": "user", "content": "?"}], "", "mcp"))
    with pytest.raises(InfrastructureError, match=r"returned the reward parts score\. Expected:"):
        asyncio.run(_answer_without_parts())


async def _answer_without_parts() -> None:
    environment = build_environment(make_task({"bank": IN_PROCESS}, parts=["tone"]))
    try:
        await environment.answer("7")
    finally:
        await environment.close()
