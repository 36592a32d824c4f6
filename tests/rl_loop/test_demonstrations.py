"""Demonstrations are what the agent loop would have recorded, with a real interpreter behind the tool."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from pydantic import ValidationError

from rl_loop.agent import EpisodeLimits, run_episode
from rl_loop.arithmetic import Problem, problem
from rl_loop.demonstrations import Demonstration, DemonstrationConfig, demonstrate
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments import Task
from rl_loop.environments.retool import INSTRUCTIONS, ReToolEnvironment, RewardConfig
from rl_loop.harmony import Harmony
from rl_loop.sandbox import PythonSandbox, SandboxConfig
from rl_loop.trajectory import FinishReason, Trajectory
from tests.rl_loop.scripted_engine import ScriptedEngine

MIXED = DemonstrationConfig(direct=0.3, direct_correct=0.5, tool=0.3, corrected=0.4)


def task_of(found: Problem) -> Task:
    messages = [{"role": "developer", "content": INSTRUCTIONS}, {"role": "user", "content": found.text}]
    return Task("t", messages, str(found.answer))


def demonstration(harmony: Harmony, index: int, mixture: DemonstrationConfig) -> Demonstration:
    found = problem("train", 0, index)
    prompt = harmony.render_prompt(task_of(found).messages)
    return demonstrate(found, prompt, harmony, mixture, random.Random(index))


def sampled_turns(demo: Demonstration) -> list[list[int]]:
    """Runs of masked tokens."""
    turns: list[list[int]] = []
    for i, (token, mask) in enumerate(zip(demo.token_ids, demo.loss_mask, strict=True)):
        if mask:
            turns += [] if demo.loss_mask[i - 1] else [[]]
            turns[-1].append(token)
    return turns


async def replay(
    harmony: Harmony, indices: range, mixture: DemonstrationConfig
) -> list[tuple[Demonstration, Trajectory]]:
    """Episodes in which the policy says what the demonstrations say and the sandbox answers."""
    sandbox = PythonSandbox(SandboxConfig(workers=1))
    await sandbox.start()
    pairs = []
    try:
        for index in indices:
            demo = demonstration(harmony, index, mixture)
            environment = ReToolEnvironment(task_of(problem("train", 0, index)), sandbox.run, RewardConfig())
            engine = ScriptedEngine(sampled_turns(demo))
            limits = EpisodeLimits(max_turns=8, max_tokens=4000, seconds=60)
            run = run_episode("t", environment, engine, harmony, limits, SamplingParams(1000), seed=0)
            pairs.append((demo, await run))
    finally:
        await sandbox.close()
    return pairs


def test_every_demonstration_is_an_episode_token_for_token(harmony: Harmony) -> None:
    kinds: Counter[tuple[int, bool]] = Counter()
    for demo, episode in asyncio.run(replay(harmony, range(40), MIXED)):
        assert demo.token_ids == episode.token_ids
        assert demo.loss_mask == episode.loss_mask
        assert episode.finish_reason is FinishReason.STOP
        kinds[episode.tool_calls, episode.reward > 0] += 1
    assert set(kinds) == {(0, False), (0, True), (1, True), (2, True)}


def test_a_second_call_follows_a_mistake(tiny: Harmony) -> None:
    mixture = DemonstrationConfig(direct=0, tool=0, corrected=1)
    for _, episode in asyncio.run(replay(tiny, range(20), mixture)):
        first, second = (turn.text.split("<|message|>")[1] for turn in episode.turns if turn.role == "tool")
        assert "SyntaxError" in first or first.startswith("<|end|>")
        assert second.removesuffix("\n<|end|><|start|>assistant").lstrip("-").isdigit()
        assert episode.reward == 1.0


def test_the_mixture_is_what_the_configuration_says(tiny: Harmony) -> None:
    mixture = DemonstrationConfig(direct=0.5, direct_correct=0.2, tool=0.3, corrected=0.2)
    counts: Counter[int] = Counter()
    right = 0
    for index in range(600):
        demo = demonstration(tiny, index, mixture)
        turns = sampled_turns(demo)
        counts[len(turns)] += 1
        wanted = rf"\boxed{{{problem('train', 0, index).answer}}}"
        right += len(turns) == 1 and wanted in tiny.decode(turns[-1])
    assert counts[1] == pytest.approx(300, abs=50)
    assert counts[2] == pytest.approx(180, abs=45)
    assert counts[3] == pytest.approx(120, abs=40)
    assert right == pytest.approx(60, abs=30)


def test_a_demonstration_depends_on_its_random_numbers_only(tiny: Harmony) -> None:
    assert demonstration(tiny, 3, MIXED) == demonstration(tiny, 3, MIXED)


def test_shares_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"must be 1, got 0\.9"):
        DemonstrationConfig(direct=0.5, tool=0.3, corrected=0.1)
