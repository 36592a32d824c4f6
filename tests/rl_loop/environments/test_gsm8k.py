"""GSM8K: published rows, and answers as models write them."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from rl_loop.environments import RewardConfig, Task, arithmetic
from rl_loop.environments.gsm8k import (
    Gsm8kEnvironment,
    Gsm8kOptions,
    build_expression,
    evaluate,
)
from rl_loop.environments.retool import MISTAKE_SHARE
from rl_loop.environments.scripted_messages import final
from rl_loop.sandbox import PythonSandbox, SandboxConfig
from rl_loop.tasks.demonstrations import PlayedEpisode, play

ROW = {
    "question": "How many dollars?",
    "answer": "He has 2*500=<<2*500=1000>>1,000 dollars.\n#### 1,000",
}


@pytest.mark.parametrize(
    ("boxed", "reward"),
    [
        ("1000", 1.0),
        ("1,000", 1.0),
        (r"\$1000", 1.0),
        ("$1,000.00$", 1.0),
        ("1{,}000", 1.0),
        (r"1000\text{ dollars}", 1.0),
        ("999", -1.0),
        (r"\$1001", -1.0),
        ("", -1.0),
    ],
)
def test_answer_is_correct_in_any_number_format(boxed: str, reward: float) -> None:
    task = Gsm8kEnvironment.from_record(ROW, "gsm8k-0", Gsm8kOptions())
    environment = Gsm8kEnvironment(task, arithmetic.interpret, RewardConfig())
    assert asyncio.run(environment.step([final(rf"So \boxed{{{boxed}}}.")])).reward == reward


CLIPS = (
    "In April 48 of them bought clips, in May half as many, 48/2 = <<48/2=24>>24.\n"
    "Altogether 48+24 = <<48+24=72>>72.\n#### 72"
)


@pytest.mark.parametrize(
    ("solution", "answer", "expression"),
    [
        (CLIPS, "72", "48+(48/2)"),
        # A result is used twice, and equal numbers have different notations.
        ("<<2*3=6>>6, <<6.0+6=12>>12", "12", "(2*3)+(2*3)"),
        ("A tenth is <<.1*50=5>>5, <<50 - 5 = 45>>45", "45", "50-(.1*50)"),
        # The last calculation has no marks, so no expression has the answer.
        ("He has <<5+8=13>>13 of 23.", "10", None),
        ("Not marked: 3+4 = 7", "7", None),
        ("An equation, <<x+2=5>>", "3", None),
        ("Too large, <<9**9**9=1>>", "1", None),
        ("Not a number, <<1+2=3>>", "three", None),
        ("No end, <<1/0=1>>", "1", None),
        ("Not exactly, <<1/3=.33>>, <<.33*3=1>>", "0.99", None),
    ],
)
def test_solution_becomes_one_expression_if_it_gives_the_answer(
    solution: str, answer: str, expression: str | None
) -> None:
    assert build_expression(solution, answer) == expression


def test_expression_of_a_doubling_solution_stays_short() -> None:
    """Without a limit the last expression would have 2^60 numbers."""
    doublings = "".join(f"<<{2**i}+{2**i}={2 ** (i + 1)}>>" for i in range(60))
    expression = build_expression(doublings, str(2**60))
    assert expression is None or len(expression) <= 200


def demonstration(task: Task, seed: int, inject_errors: bool) -> PlayedEpisode:
    environment = Gsm8kEnvironment(task, Gsm8kEnvironment.simulate_python, RewardConfig())
    return asyncio.run(play(environment, Gsm8kEnvironment.solve(task, Random(seed), inject_errors)))


def test_demonstration_runs_the_calculation_of_the_solution() -> None:
    row = {"question": "How many clips?", "answer": CLIPS}
    task = Gsm8kEnvironment.from_record(row, "gsm8k-0", Gsm8kOptions(tools=True))
    episodes = [demonstration(task, seed, inject_errors=False) for seed in range(20)]
    assert all(episode.turns[-1].result.reward == 1 for episode in episodes)

    # Some scripts begin with a mistake. The last call is always the whole calculation.
    calls = [episode.turns[-2] for episode in episodes]
    assert {call.messages[-1].text for call in calls} == {"print(48+(48/2))"}
    assert {call.result.tool_outputs[0].text for call in calls} == {"72.0\n"}
    assert 0 < sum(len(episode.turns) == 3 for episode in episodes) < 20 * 3 * MISTAKE_SHARE


@pytest.mark.parametrize("tools", [False, True])
def test_demonstration_without_a_calculation_answers_directly(tools: bool) -> None:
    row = {"question": "How many?", "answer": "Equating both, p = 1000.\n#### 1,000"}
    task = Gsm8kEnvironment.from_record(row, "gsm8k-0", Gsm8kOptions(tools=tools))
    episode = demonstration(task, 0, inject_errors=False)
    assert len(episode.turns) == 1
    assert episode.turns[0].result.reward == 1
    guesses = {
        demonstration(task, seed, inject_errors=True).turns[-1].result.reward for seed in range(9)
    }
    assert -1 in guesses


def test_demonstrated_programs_print_the_output_of_python() -> None:
    expressions = ["48+(48/2)", "847/7", "2*20*.01*1000", "7-(3*2)", ".1+.2", "10//4", "1/0"]

    async def printed() -> list[str]:
        sandbox = PythonSandbox(SandboxConfig(servers=1))
        await sandbox.start()
        try:
            return [(await sandbox.run(f"print({text})")).output for text in expressions]
        finally:
            await sandbox.close()

    outputs = asyncio.run(printed())
    for text, output in zip(expressions[:-1], outputs[:-1], strict=True):
        assert f"{evaluate(text)}\n" == output
    assert "ZeroDivisionError" in outputs[-1]
    assert evaluate("1/0") is None
