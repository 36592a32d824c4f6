"""Demonstrations are what the agent loop would have recorded, with a real interpreter behind the tool."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from rl_loop.agent import EpisodeLimits, run_episode
from rl_loop.demonstrations import Demonstration, DemonstrationConfig, demonstrate
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments import RewardConfig, Task, environment_class, make_environment
from rl_loop.harmony import Harmony
from rl_loop.sandbox import PythonSandbox, SandboxConfig
from rl_loop.trajectory import FinishReason, Trajectory
from tests.rl_loop.scripted_engine import ScriptedEngine

MIXED = DemonstrationConfig(careful=0.5)


def task_of(environment: str, index: int, **options: object) -> Task:
    kind = environment_class(environment)
    return kind.generate("train", 0, index, kind.Options.model_validate(options))


def sampled_turns(demo: Demonstration) -> list[list[int]]:
    """Runs of masked tokens."""
    turns: list[list[int]] = []
    for i, (token, mask) in enumerate(zip(demo.token_ids, demo.loss_mask, strict=True)):
        if mask:
            turns += [] if demo.loss_mask[i - 1] else [[]]
            turns[-1].append(token)
    return turns


async def replay(harmony: Harmony, tasks: list[Task]) -> list[tuple[Demonstration, Trajectory]]:
    """Episodes in which the policy says what the demonstrations say and the sandbox answers."""
    sandbox = PythonSandbox(SandboxConfig(workers=1))
    await sandbox.start()
    pairs = []
    try:
        for index, task in enumerate(tasks):
            demo = await asyncio.to_thread(demonstrate, task, harmony, MIXED, str(index))
            environment = make_environment(task, sandbox.run, RewardConfig())
            engine = ScriptedEngine(sampled_turns(demo))
            limits = EpisodeLimits(max_turns=20, max_tokens=9000, episode_seconds=60)
            run = run_episode("t", environment, engine, harmony, limits, SamplingParams(4000), seed=0)
            pairs.append((demo, await run))
    finally:
        await sandbox.close()
    return pairs


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ("retool", {}),
        ("gsm8k", {}),
        ("instructions", {"turns": 2, "checkers": ["punctuation:no_comma", "startend:quotation", "keywords:existence"],
                          "constraints": 1}),
        ("incident", {"level": 3}),
        ("reasoning_gym", {}),
    ],
)  # fmt: skip
def test_every_demonstration_is_an_episode_token_for_token(
    harmony: Harmony, environment: str, options: dict[str, object]
) -> None:
    right = 0.0
    tasks = [task_of(environment, i, **options) for i in range(20)]
    for demo, episode in asyncio.run(replay(harmony, tasks)):
        assert demo.token_ids == episode.token_ids
        assert demo.loss_mask == episode.loss_mask
        assert episode.finish_reason is FinishReason.STOP
        assert demo.result is not None
        assert demo.result.reward == episode.reward
        right += episode.reward_parts["correct"]
    assert 3 <= right <= 18


def test_retool_is_shown_with_and_without_mistakes(tiny: Harmony) -> None:
    calls: Counter[int] = Counter()
    for _, episode in asyncio.run(replay(tiny, [task_of("retool", i) for i in range(40)])):
        calls[episode.tool_calls] += 1
        assert episode.tool_calls == 0 or episode.reward == 1.0
    assert set(calls) == {0, 1, 2}


def test_the_share_of_careful_demonstrations_is_as_configured(tiny: Harmony) -> None:
    right = 0.0
    for index in range(300):
        result = demonstrate(task_of("gsm8k", index), tiny, DemonstrationConfig(careful=0.3), str(index)).result
        assert result is not None
        right += result.reward_parts["correct"]
    assert right / 300 == pytest.approx(0.3, abs=0.1)


def test_a_demonstration_is_a_function_of_its_task_and_seed(tiny: Harmony) -> None:
    task = task_of("retool", 3)
    assert demonstrate(task, tiny, MIXED, "7") == demonstrate(task, tiny, MIXED, "7")
