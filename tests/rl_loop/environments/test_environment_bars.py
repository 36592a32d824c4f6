"""Every environment is reproducible, bounded by its scripted policies, and robust to any agent."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import pytest

from rl_loop.config.training import DemonstrationConfig
from rl_loop.environments import (
    ENVIRONMENTS,
    RewardConfig,
    StepResult,
    Task,
    arithmetic,
    environment_class,
    make_environment,
)
from rl_loop.environments.incident import IncidentEnvironment
from rl_loop.environments.scripted_messages import final, function_call, think
from rl_loop.harmony.codec import Harmony, ParsedMessage
from rl_loop.tasks.demonstrations import demonstrate
from tests.support.processor_speed import slowness

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("retool", {}),
    ("retool", {"stateful": True}),
    ("gsm8k", {"tools": True}),
    ("instructions", {"constraints": 1, "turns": 3}),
    ("incident", {"level": 1}),
    ("incident", {"level": 3}),
    ("reasoning_gym", {"generator": "gsm_symbolic"}),
]
REWARD = RewardConfig(correct=3.0, wrong=-2.0, format_error=-5.0)


def generate_task(
    name: str, options: dict[str, Any], index: int, split: str = "train", seed: int = 0
) -> Task:
    kind = environment_class(name)
    return kind.generate(split, seed, index, kind.Options.model_validate(options))  # type: ignore[arg-type]


def test_every_environment_is_tested_here() -> None:
    # External agents run episodes of black_box (tests/rl_loop/agents). The other two need servers
    # (test_mcp_tools.py, test_openenv.py).
    elsewhere = {"black_box", "mcp", "openenv"}
    assert {name for name, _ in KINDS} == set(ENVIRONMENTS) - elsewhere


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_tasks_are_reproducible_and_survive_json(name: str, options: dict[str, Any]) -> None:
    tasks = [generate_task(name, options, i) for i in range(6)]
    assert tasks == [generate_task(name, options, i) for i in range(6)]
    assert Task(**json.loads(tasks[0].to_json())) == tasks[0]
    assert [t.messages for t in tasks] != [
        generate_task(name, options, i, seed=1).messages for i in range(6)
    ]
    assert [t.messages for t in tasks] != [
        generate_task(name, options, i, split="held_out").messages for i in range(6)
    ]


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_episode_has_the_same_reward_parts_for_every_ending(
    tiny: Harmony, name: str, options: dict[str, Any]
) -> None:
    task = generate_task(name, options, 0)
    environment = make_environment(task, arithmetic.interpret, REWARD)
    unfinished, illegal = environment.end_truncated(), environment.end_with_format_error("header")
    finished = demonstrate(task, tiny, DemonstrationConfig(correct_fraction=1), "0").result
    assert finished is not None
    assert set(illegal.reward_parts) == set(unfinished.reward_parts) == set(finished.reward_parts)
    assert illegal.reward_parts["format_error"] == 1.0
    assert illegal.reward_parts["correct"] == 0.0
    assert illegal.reward_parts["score"] <= 0.0


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_expert_scores_the_maximum_and_empty_answer_the_minimum(
    tiny: Harmony, name: str, options: dict[str, Any]
) -> None:
    scores = []
    for index in range(15):
        task = generate_task(name, options, index)
        shown = demonstrate(task, tiny, DemonstrationConfig(correct_fraction=1), str(index))
        assert shown.result is not None
        assert shown.result.reward_parts["score"] == pytest.approx(1.0)
        assert shown.result.reward_parts["correct"] == 1.0
        empty = asyncio.run(until_done(task, [final("")]))
        assert empty.reward == pytest.approx(-2.0)
        assert make_environment(
            task, arithmetic.interpret, REWARD
        ).end_truncated().reward == pytest.approx(-2.0)
        faulty = demonstrate(task, tiny, DemonstrationConfig(correct_fraction=0), str(index)).result
        assert faulty is not None
        scores.append(faulty.reward_parts["score"])
    assert sum(scores) / len(scores) < 0.95


async def until_done(task: Task, turn: list[ParsedMessage]) -> StepResult:
    environment = make_environment(task, arithmetic.interpret, REWARD)
    for _ in range(20):
        result = await environment.step(turn)
        if result.done:
            return result
    raise AssertionError(f"{task.environment}: no end after 20 answers")


def random_message(rng: random.Random, known: list[str]) -> ParsedMessage:
    names = [
        "fetch_email",
        "query_logs",
        "isolate_host",
        "block_domain",
        "reset_user",
        "submit_report",
        "python",
        "x",
    ]
    values: list[Any] = [
        *known,
        "",
        "h11",
        "m42",
        7,
        None,
        [],
        {"a": 1},
        "\x00",
        r"\boxed{\frac{",
        "print(1)",
    ]
    keys = ["email", "name", "host", "domain", "user", "target", "contained", "code"]
    kind = rng.randrange(6)
    if kind == 0:
        return final(rng.choice([r"\boxed{7}", "", "*" * 50, '"a, b"', "My answer is yes."]))
    if kind == 1:
        return think("hm")
    if kind == 2:
        return ParsedMessage(
            "analysis",
            rng.choice(["python", "browser", "functions.", "", "assistant"]),
            None,
            "print(2)",
        )
    if kind == 3:
        broken = rng.choice(["{", "[]", "null", "[" * 2000, '{"a": NaN}', "\ud800"])
        return ParsedMessage("commentary", f"functions.{rng.choice(names)}", "json", broken)
    return function_call(
        rng.choice(names), **{key: rng.choice(values) for key in rng.sample(keys, 4)}
    )


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_1000_random_policies_end_without_an_exception(name: str, options: dict[str, Any]) -> None:
    tasks = [generate_task(name, options, i) for i in range(10)]

    async def play(agent: int) -> StepResult:
        rng, task = random.Random(agent), tasks[agent % len(tasks)]
        known = [value for value in task.metadata.get("truth", {}).values()]
        environment = make_environment(task, arithmetic.interpret, REWARD)
        for _ in range(30):
            result = await environment.step(
                [random_message(rng, known) for _ in range(rng.randint(1, 3))]
            )
            if result.done:
                return result
        return environment.end_truncated()

    async def main() -> None:
        for agent in range(1000):
            result = await play(agent)
            assert result.done
            assert -25 < result.reward <= 3.0
            assert result.reward_parts["correct"] in (0.0, 1.0)

    asyncio.run(main())


def test_format_error_does_not_undo_an_earlier_penalty() -> None:
    async def reward(*turns: list[ParsedMessage]) -> float:
        environment = make_environment(
            generate_task("incident", {}, 0), arithmetic.interpret, REWARD
        )
        return [(await environment.step(turn)).reward for turn in turns][-1]

    illegal, harm = [function_call("x")], [function_call("reset_user", user="nobody")]
    assert asyncio.run(reward(illegal)) == pytest.approx(-5.0)
    assert asyncio.run(reward(harm, illegal)) == pytest.approx(-5.0 - 5.0 * 0.5 / 9)


def test_function_is_called_by_its_namespace_and_name_only() -> None:
    async def call(recipient: str) -> tuple[StepResult, list[dict[str, Any]]]:
        environment = make_environment(
            generate_task("incident", {}, 0), arithmetic.interpret, REWARD
        )
        assert isinstance(environment, IncidentEnvironment)
        message = ParsedMessage("commentary", recipient, "json", '{"user": "ana"}')
        result = await environment.step([message])
        return result, [event for event in environment.log if event["actor"] == "agent"]

    result, done = asyncio.run(call("functions.reset_user"))
    assert (result.format_error, len(done)) == (None, 1)

    result, done = asyncio.run(call("reset_user"))
    assert (result.format_error, len(done)) == ("unknown_tool", 0)


@pytest.mark.parametrize(("name", "options"), [kind for kind in KINDS if kind[0] != "retool"])
def test_1000_steps_take_at_most_one_second_of_one_core(name: str, options: dict[str, Any]) -> None:
    options = options | ({"tools": False} if name == "gsm8k" else {})
    tasks = [generate_task(name, options, i) for i in range(20)]
    turns = {
        "gsm8k": [final(r"It is \boxed{12}.")],
        "instructions": [final("A short text, about bread.")],
        "incident": [function_call("query_logs", name="ana")],
        "reasoning_gym": [final(r"\boxed{12}")],
    }

    async def main() -> int:
        steps = 0
        for _ in range(10):
            for task in tasks:
                environment = make_environment(task, arithmetic.interpret, REWARD)
                for _n in range(3):
                    steps += 1
                    if (await environment.step(turns[name])).done:
                        break
        return steps

    asyncio.run(main())  # warm-up: imports and caches
    # The best of a few attempts, because other programs slow some of them down.
    fastest = 0.0
    for _ in range(4):
        began = time.process_time()
        steps = asyncio.run(main())
        seconds = time.process_time() - began
        fastest = max(fastest, steps / seconds * slowness())
        if fastest > 1000:
            break
    print(f"{name}: {fastest:.0f} steps/s")
    assert fastest > 1000
