r"""ReTool with the real interpreter: Python calls, the answer in \boxed{}, and rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rl_loop.environments import Environment, RewardConfig, StepResult, Task, make_environment
from rl_loop.environments.retool import NEW_SESSION, ReToolEnvironment
from rl_loop.harmony.codec import ParsedMessage, ToolOutput
from rl_loop.sandbox import PythonSandbox, SandboxConfig

TASK = Task("t", [{"role": "user", "content": "6*7?"}], "42")
REWARD = RewardConfig(correct=2.0, wrong=-3.0, format_error=-4.0)


async def in_sandbox[T](body: Callable[[Environment], Awaitable[T]]) -> T:
    sandbox = PythonSandbox(SandboxConfig(servers=1, timeout_seconds=1))
    await sandbox.start()
    try:
        return await body(make_environment(TASK, sandbox.run, REWARD))
    finally:
        await sandbox.close()


def steps(*messages: ParsedMessage) -> list[StepResult]:
    async def body(environment: Environment) -> list[StepResult]:
        return [await environment.step([message]) for message in messages]

    return asyncio.run(in_sandbox(body))


def without_sandbox() -> ReToolEnvironment:
    async def execute(code: str) -> Any:
        raise AssertionError(f"nothing should run, but {code!r} did")

    return ReToolEnvironment(TASK, execute, REWARD)


def step(*messages: ParsedMessage) -> StepResult:
    return asyncio.run(without_sandbox().step(messages))


def python(code: str) -> ParsedMessage:
    return ParsedMessage("analysis", "python", "code", code)


def function(arguments: str) -> ParsedMessage:
    return ParsedMessage("commentary", "functions.python", "<|constrain|>json", arguments)


def final(text: str) -> ParsedMessage:
    return ParsedMessage("final", None, None, text)


def test_python_output_and_errors_are_tool_results() -> None:
    good, error, slow, json = steps(
        python("print(6*7)"),
        python("print(6*7"),
        python("while True: pass"),
        function('{"code": "6*7"}'),
    )
    assert good.tool_outputs == [ToolOutput("python", "analysis", "42\n")]
    assert json.tool_outputs == [ToolOutput("functions.python", "commentary", "42\n")]
    assert "SyntaxError" in error.tool_outputs[0].text
    assert slow.tool_outputs[0].text.startswith("killed: it ran longer than 1 s")
    assert [result.tool_errors for result in (good, error, slow, json)] == [0, 1, 1, 0]
    assert all(result.tool_calls == 1 and not result.done for result in (good, error, slow, json))


@pytest.mark.parametrize("arguments", ["print(1)", "[]", "{}", "null", '{"code": {"a": 1}}'])
def test_invalid_function_arguments_are_reported_to_the_policy(arguments: str) -> None:
    (result,) = steps(function(arguments))
    assert not result.done
    assert result.tool_calls == 1


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (r"\boxed{42}", 2.0),
        (r"It is \boxed{\frac{84}{2}}.", 2.0),
        (r"\boxed{41}", -3.0),
        ("42", -3.0),
        ("", -3.0),
    ],
)
def test_final_answer_is_compared_and_ends_the_episode(text: str, reward: float) -> None:
    result = step(final(text))
    assert (result.done, result.reward, result.format_error) == (True, reward, None)
    assert (result.reward_parts["correct"], result.reward_parts["format_error"]) == (
        float(reward > 0),
        0.0,
    )


def test_variables_last_within_a_stateful_episode() -> None:
    programs = ["x = 40\nprint('no')", "x += 1", "1 / 0", "x + 1"]

    async def outputs(stateful: bool) -> list[str]:
        sandbox = PythonSandbox(SandboxConfig(servers=1, timeout_seconds=5))
        await sandbox.start()
        task = Task("t", TASK.messages, "42", metadata={"stateful": stateful})
        environment = make_environment(task, sandbox.run, REWARD)
        found = [(await environment.step([python(code)])).tool_outputs[0].text for code in programs]
        await sandbox.close()
        return found

    first, second, third, fourth = asyncio.run(outputs(True))
    assert (first, second, fourth) == ("no\n", "", "42\n")
    assert "ZeroDivisionError" in third
    assert "NameError" in asyncio.run(outputs(False))[3]


@pytest.mark.parametrize(
    "ending",
    ["exit()", "import os; os._exit(3)", "import ctypes; ctypes.string_at(0)", "while True: pass"],
)
def test_restarted_session_reports_its_restart_once(ending: str) -> None:
    programs = ["x = 1\nprint('one')", f"print('two')\n{ending}", "x", "y = 5\nprint('three')", "y"]

    async def outputs() -> list[str]:
        sandbox = PythonSandbox(SandboxConfig(servers=1, timeout_seconds=3))
        await sandbox.start()
        task = Task("t", TASK.messages, "42", metadata={"stateful": True})
        environment = make_environment(task, sandbox.run, REWARD)
        found = [(await environment.step([python(code)])).tool_outputs[0].text for code in programs]
        await sandbox.close()
        return found

    one, two, third, fourth, fifth = asyncio.run(outputs())
    assert one == "one\n"
    assert two.startswith("two\n")
    assert third.startswith(NEW_SESSION)
    assert "NameError: name 'x' is not defined" in third
    assert (fourth, fifth) == ("three\n", "5\n")


def test_exception_keeps_the_session_and_its_variables() -> None:
    programs = ["x = 1\n1 / 0", "x"]

    async def outputs() -> list[str]:
        sandbox = PythonSandbox(SandboxConfig(servers=1, timeout_seconds=5))
        await sandbox.start()
        task = Task("t", TASK.messages, "42", metadata={"stateful": True})
        environment = make_environment(task, sandbox.run, REWARD)
        found = [(await environment.step([python(code)])).tool_outputs[0].text for code in programs]
        await sandbox.close()
        return found

    first, second = asyncio.run(outputs())
    assert "ZeroDivisionError" in first
    assert second == "1\n"


def test_calls_of_a_turn_are_executed_in_order() -> None:
    async def body(environment: Environment) -> StepResult:
        return await environment.step([python("1"), function('{"code": "2"}'), python("3/0")])

    result = asyncio.run(in_sandbox(body))
    assert [output.text for output in result.tool_outputs[:2]] == ["1\n", "2\n"]
    assert (result.tool_calls, result.tool_errors) == (3, 1)


def test_tool_use_raises_the_reward_of_wrong_answers_if_enabled() -> None:
    async def body(_: Environment) -> list[float]:
        rewards = []
        for calls in (0, 2, 20):
            environment = make_environment(TASK, _.execute, RewardConfig(tool_use_bonus=True))
            for _n in range(calls):
                await environment.step([python("1")])
            rewards.append((await environment.step([final("?")])).reward)
        return rewards

    assert asyncio.run(in_sandbox(body)) == pytest.approx([-1.0, -0.9, -0.6])


@pytest.mark.parametrize(
    "message",
    [
        ParsedMessage("analysis", "browser", None, "x"),
        ParsedMessage("commentary", "functions.other", None, "{}"),
        ParsedMessage("analysis", "", None, "print(1)"),
        ParsedMessage("analysis", "assistant", None, "x"),
        ParsedMessage("analysis", None, None, "I think so."),
        ParsedMessage("commentary", None, None, "Working on it."),
    ],
)
def test_turn_without_answer_or_python_call_is_a_format_error(
    message: ParsedMessage,
) -> None:
    result = step(message)
    assert (result.done, result.reward) == (True, -4.0)
    assert result.format_error
    assert result.reward_parts == {"correct": 0.0, "format_error": 1.0, "score": 0.0}


def test_truncated_episode_counts_as_wrong() -> None:
    result = without_sandbox().end_truncated()
    assert (result.done, result.reward, result.reward_parts["correct"]) == (True, -3.0, 0.0)


def test_comparison_of_an_answer_does_not_block_the_event_loop() -> None:
    async def main() -> int:
        comparison = asyncio.create_task(
            without_sandbox().step([final(r"\boxed{\binom{10^{9}}{5\cdot 10^{8}}}")])
        )
        ticks = 0
        while not comparison.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert comparison.result().reward == -3.0
        return ticks

    assert asyncio.run(main()) > 50


def test_unknown_environment_is_named() -> None:
    task = Task("t7", [], "", environment="chess")
    with pytest.raises(
        ValueError,
        match=r"there is no environment 'chess'\. Known names: black_box, gsm8k, incident",
    ):
        make_environment(task, without_sandbox().execute, REWARD)
