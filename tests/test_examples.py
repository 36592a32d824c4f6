"""The programs of examples/ run with the commands of their docstrings and print correct results."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_loop.config.tasks import SourceConfig
from rl_loop.environments import environment_class
from rl_loop.tracking.run_directory import read_json_lines
from tests.support.forked_workers import forked_python
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str, *arguments: str) -> str:
    """Run a program of examples/ as a user would, and return its output."""
    python = forked_python()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*python, f"examples/{name}.py", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_docstring_has_its_command(path: Path) -> None:
    assert f"\n    python examples/{path.name}" in path.read_text()


def test_every_example_has_a_test() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "chat_with_tools",
        "clerk_agent",
        "convert_checkpoint",
        "custom_environment",
        "mcp_environment",
        "sdk_agents",
        "sink_attention_in_torch",
        "train",
    }


def test_the_torch_model_with_sink_attention_learns_to_repeat() -> None:
    printed = run("sink_attention_in_torch", "200")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[0] > 3
    assert losses[-1] < 0.1
    sinks = [float(sink) for sink in re.search(r"sinks: \[(.*)\]", printed)[1].split(", ")]
    assert all(abs(sink) > 0.01 for sink in sinks), "a sink had no gradient"


def test_tool_chat_example_holds_out_questions(tmp_path: Path) -> None:
    """tests/rl_loop/test_sft_on_conversations.py tests the training on these conversations."""
    assert "4000 and 100 conversations" in run("chat_with_tools", str(tmp_path))

    def questions_and_answers(name: str) -> list[tuple[str, str]]:
        """Return the questions of a file and the answers of the tool."""
        pairs = []
        for line in (tmp_path / name).read_text().splitlines():
            messages = json.loads(line)["messages"]
            questions = [m["content"] for m in messages if m["role"] == "user"]
            answers = [m["content"] for m in messages if m["role"] == "tool"]
            pairs += list(zip(questions, answers, strict=True))
        return pairs

    held_out = questions_and_answers("held_out.jsonl")
    assert len(set(held_out)) == 200
    assert not set(held_out) & set(questions_and_answers("train.jsonl"))


def test_weather_chats_hold_out_questions(tmp_path: Path) -> None:
    assert "4000 and 100 conversations" in run("chat_with_tools", str(tmp_path), "--weather")
    asked: dict[str, set[str]] = {}
    for name in ("train", "held_out"):
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        chats = [json.loads(line)["messages"] for line in lines]
        asked[name] = {messages[0]["content"] for messages in chats}
        assert all(len(messages[1]["tool_calls"]) == 2 for messages in chats)
    assert len(asked["held_out"]) == 100
    assert not asked["held_out"] & asked["train"]


def test_clerk_example_holds_out_questions_and_imports_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/agents.md shows the training through the gateway, and tests/rl_loop/agents runs it."""
    assert "3000 chats" in run("clerk_agent", str(tmp_path))
    assert "rl_loop" not in (ROOT / "examples/clerk_agent.py").read_text()

    monkeypatch.syspath_prepend(ROOT / "examples")
    tasks = importlib.import_module("clerk_agent").tasks
    held_out = {tasks("held_out", 0, i)["prompt"] for i in range(128)}
    chats = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    asked = {chat["messages"][1]["content"] for chat in chats}
    trained = {tasks("train", 0, i)["prompt"] for i in range(300)}
    assert len(held_out) == 64
    assert len(trained) == 192
    assert asked <= trained
    assert not held_out & trained
    prices = {tasks("train", 0, 192 * i)["price"] for i in range(20)}
    assert len(prices) > 5, "the same question has other answers"


def test_chats_of_orders_hold_out_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/rl_loop/agents/test_programs.py runs the agent."""
    assert "3000 chats" in run("clerk_agent", str(tmp_path), "--orders")
    monkeypatch.syspath_prepend(ROOT / "examples")
    clerk = importlib.import_module("clerk_agent")
    held_out = {clerk.orders("held_out", 0, i)["prompt"] for i in range(128)}
    assert len(held_out) == 128

    looked_up = 0
    for line in (tmp_path / "chats.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        order, question = (m["content"] for m in messages if m["role"] == "user")
        assert order not in held_out
        item = re.fullmatch(r"What does the (\w+) cost\?", question)[1]
        assert f"a {item}" in order
        for message in messages:
            for call in message.get("tool_calls", ()):
                arguments = json.loads(call["function"]["arguments"])
                assert arguments["item"] == item and f"I am in {arguments['town']}." in order
                looked_up += 1
    assert 1350 < looked_up < 1650


def test_sdk_agents_example_holds_out_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/rl_loop/agents/test_programs.py tests the runs of the agents."""
    assert "rl_loop" not in (ROOT / "examples/sdk_agents.py").read_text()
    monkeypatch.syspath_prepend(ROOT / "examples")
    tasks = importlib.import_module("sdk_agents").tasks
    held_out, trained = (
        {tasks(split, 0, i)["prompt"] for i in range(200)} for split in ("held_out", "train")
    )
    assert (len(held_out), len(trained)) == (33, 100)
    assert not held_out & trained


def test_conversion_example_round_trip_is_bit_exact(tmp_path: Path) -> None:
    printed = run("convert_checkpoint", str(tmp_path))
    assert "exported: 0 weights differ" in printed
    assert "tensors are equal bit for bit" in printed
    assert "transformers loads it" in printed
    assert (tmp_path / "exported/model.safetensors").exists()


def test_custom_environment_rewards_expert_above_greedy_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = run("custom_environment")
    rewards = {
        name: re.findall(rf"{name}: .*reward ([+-][\d.]+)", printed)
        for name in ("expert", "greedy")
    }
    assert set(rewards["expert"]) == {"+1.00"}
    assert min(map(float, rewards["greedy"])) < 1

    # A configuration accepts the environment. A useless answer gets the lowest reward.
    monkeypatch.syspath_prepend(ROOT / "examples")
    SourceConfig(environment="custom_environment:CoinEnvironment", options={"largest": 30})
    coins = environment_class("custom_environment:CoinEnvironment")
    task = coins.generate("train", 0, 0, coins.Options())
    episode = coins(task, None, sys.modules["custom_environment"].RewardConfig())  # type: ignore[arg-type]
    assert asyncio.run(episode.answer("0")).reward == -1


def test_mcp_environment_rewards_expert_above_guesses() -> None:
    """tests/rl_loop/environments/test_mcp_tools.py tests failures and recovery of the servers."""
    printed = run("mcp_environment")
    assert len(re.findall(r"expert: I look it up\. .* shelf \d+ -> reward \+1\.00", printed)) == 3
    assert len(re.findall(r"guess: I guess\. .* -> reward -1\.00", printed)) == 3


def test_train_example_prints_the_metrics_of_its_runs(tmp_path: Path) -> None:
    """One step of each stage, on a CPU, in a new directory."""
    printed = run("train", str(tmp_path / "runs"), "1")
    assert re.search(r"^python_sft step 1: loss \d+\.\d+$", printed, re.MULTILINE)
    assert re.search(r"^python_rl step 1: reward -?\d+\.\d+$", printed, re.MULTILINE)
    assert re.search(r"^held-out accuracy: \d\.\d+ -> \d\.\d+$", printed, re.MULTILINE)

    records = read_json_lines(tmp_path / "runs/python_rl/metrics.jsonl")
    rewards = [record["reward"] for record in records if "reward" in record]
    assert f"rewards: {rewards}" in printed
    configuration = (tmp_path / "runs/python_rl/config.yaml").read_text()
    assert "initial_weights: " + str(tmp_path / "runs/python_sft") in configuration
