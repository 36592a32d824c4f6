"""An agent that behaves as the agent loop gets the same episodes, to the byte.

The engine is a script, so both paths see the same samples, weight versions, routes and aborts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest

from rl_loop.agents.episode import AgentRunner
from rl_loop.agents.process import AgentProcesses
from rl_loop.chat.tools import Tool
from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.trajectory import FinishReason, Trajectory
from rl_loop.engines.protocol import ModelShape, SamplingParams
from rl_loop.environments import RewardConfig, Task
from rl_loop.environments import make_offline_environment as make_environment
from rl_loop.environments.base import Environment, StepResult
from rl_loop.environments.black_box import BlackBoxEnvironment, BlackBoxOptions
from rl_loop.environments.tool_calls import parse_arguments
from rl_loop.gateway.server import Gateway, GatewaySettings
from rl_loop.gateway.session import SessionSettings
from rl_loop.harmony.codec import Harmony, ParsedMessage
from rl_loop.rollout import turn_sampler
from rl_loop.rollout.agent import run_episode
from tests.support.rl_loop.scripted_engine import ScriptedEngine

PROMPT, FOLLOW_UPS, ANSWER = "Add 1 and 2.", ["And 3?"], "6"
SCHEMA = {
    "type": "object",
    "properties": {"terms": {"type": "array", "items": {"type": "integer"}}},
    "required": ["terms"],
}
LIMITS = EpisodeLimits(
    max_turns=6, max_episode_tokens=600, max_episode_seconds=120.0, truncated_episodes="mask"
)


class Adding(Environment):
    """Environment with a function, and a question of the user after every answer but the last."""

    def __init__(self) -> None:
        task = Task("task", [{"role": "user", "content": PROMPT}], ANSWER)
        super().__init__(task, None, RewardConfig())  # type: ignore[arg-type]
        self.follow_ups = list(FOLLOW_UPS)

    def tools(self) -> Sequence[Tool]:
        return (Tool("add", "Adds.", SCHEMA),)

    async def call(self, tool: str, arguments: str) -> str:
        return str(sum(parse_arguments(arguments)["terms"]))

    async def answer(self, text: str) -> StepResult:
        if self.follow_ups:
            return StepResult(user=self.follow_ups.pop(0))
        return self.end_with_score(float(text == ANSWER))


@dataclass(frozen=True)
class Case:
    """One episode and its expected end."""

    reason: FinishReason
    turns: Sequence[str] = ("add", "3", "add", "6")
    """Texts of final answers; "add" for a call, "illegal" for a malformed turn."""
    aborts: Iterable[int | None] = ()
    hang: bool = False
    limits: dict[str, Any] = field(default_factory=dict)
    max_new_tokens: int = 100
    excluded: bool = False


CASES = {
    "right": Case(FinishReason.STOP),
    "wrong": Case(FinishReason.STOP, ("3", "7")),
    "aborted": Case(FinishReason.STOP, aborts=(5, 0, 3, None, 2, None, 0, 0, 4)),
    "illegal": Case(FinishReason.FORMAT_ERROR, ("add", "illegal")),
    "turn_too_long": Case(FinishReason.LENGTH, ("3", "6" * 40), max_new_tokens=30, excluded=True),
    "turns": Case(FinishReason.MAX_TURNS, limits={"max_turns": 3}, excluded=True),
    "sampled": Case(
        FinishReason.MAX_SAMPLED_TOKENS,
        ("3", "6" * 40),
        limits={"max_sampled_tokens": 40},
        excluded=True,
    ),
    "context_in_a_turn": Case(
        FinishReason.MAX_EPISODE_TOKENS,
        ("3", "6" * 90),
        limits={"max_episode_tokens": 150},
        excluded=True,
    ),
    "context_before_a_turn": Case(
        FinishReason.MAX_EPISODE_TOKENS,
        ("3" * 20, "6"),
        limits={"max_episode_tokens": 0},
        excluded=True,
    ),
    "time": Case(
        FinishReason.TIMEOUT,
        ("3", "6"),
        hang=True,
        limits={"max_episode_seconds": 3.0},
        excluded=True,
    ),
    # The script has no third turn, so every attempt to sample it fails.
    "engine": Case(FinishReason.ABORT, ("add", "3"), excluded=True),
}


def render_turn(harmony: Harmony, text: str) -> list[int]:
    if text == "illegal":
        return harmony.render_assistant([ParsedMessage("nonsense", None, None, "x")], "<|return|>")
    if text == "add":
        message = ParsedMessage(
            "commentary", "functions.add", "<|constrain|>json", json.dumps({"terms": [1, 2]})
        )
        return harmony.render_assistant([message], "<|call|>")
    thought = ParsedMessage("analysis", None, None, "So.")
    return harmony.render_assistant(
        [thought, ParsedMessage("final", None, None, text)], "<|return|>"
    )


class Players:
    """Runs cases on both paths. All agents share one process."""

    def __init__(self, harmony: Harmony) -> None:
        self.harmony = harmony
        self.processes = AgentProcesses()

    def engine(self, case: Case) -> ScriptedEngine:
        turns = [render_turn(self.harmony, text) for text in case.turns]
        return ScriptedEngine(turns, case.aborts, hang=case.hang)

    def limits(self, case: Case) -> EpisodeLimits:
        limits = dict(case.limits)
        if limits.get("max_episode_tokens") == 0:
            # The limit allows all tokens of the first turn but not the second turn.
            prompt = self.harmony.render_prompt(
                [{"role": "user", "content": PROMPT}], Adding().tools()
            )
            limits["max_episode_tokens"] = (
                len(prompt) + len(render_turn(self.harmony, case.turns[0])) + 2
            )
        return LIMITS.model_copy(update=limits)

    async def loop(self, case: Case) -> Trajectory:
        return await run_episode(
            "task",
            Adding(),
            self.engine(case),
            self.harmony,
            self.limits(case),
            SamplingParams(case.max_new_tokens),
            seed=3,
            record_routes=True,
        )

    async def agent(self, case: Case) -> Trajectory:
        function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
        record = {
            "prompt": PROMPT,
            "follow_ups": FOLLOW_UPS,
            "answer": ANSWER,
            "tool": {"type": "function", "function": function},
        }
        options = BlackBoxOptions(agent="tests.support.rl_loop.agents.programs:adding", memory_gb=2)
        environment = make_environment(BlackBoxEnvironment.from_record(record, "task", options))

        limits = self.limits(case)
        sampling = SamplingParams(case.max_new_tokens)
        settings = GatewaySettings(SessionSettings(limits, sampling))
        shape = ModelShape(self.harmony.vocabulary.size)
        gateway = Gateway(self.engine(case), self.harmony, shape, settings)
        await gateway.start()
        try:
            runner = AgentRunner(gateway, self.processes, limits)
            return await runner.run_episode(
                "task", environment, sampling, seed=3, record_routes=True
            )
        finally:
            await gateway.close()


@pytest.fixture(scope="module")
def played(tiny: Harmony) -> dict[str, tuple[Trajectory, Trajectory]]:
    """Episodes of every case: by the agent loop and by an external agent."""

    async def play() -> dict[str, tuple[Trajectory, Trajectory]]:
        players = Players(tiny)
        try:
            return {
                name: (await players.loop(case), await players.agent(case))
                for name, case in CASES.items()
            }
        finally:
            await players.processes.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn_sampler, "FAULT_RETRY_DELAYS", (0.0,))
        patch.setattr(turn_sampler, "ABORT_RETRY_DELAYS", (0.0,) * 8)
        return asyncio.run(play())


def contents(trajectory: Trajectory) -> dict[str, Any]:
    """Return all fields of a trajectory. Arrays become dtype, shape and bytes."""
    found: dict[str, Any] = {}
    for column in fields(Trajectory):
        value = getattr(trajectory, column.name)
        if isinstance(value, np.ndarray):
            value = (value.dtype.str, value.shape, value.tobytes())
        found[column.name] = value
    # NaN does not equal itself, and the environments have different names.
    found["reward"] = repr(found["reward"])
    if trajectory.invalid is not None:
        found["invalid"] = (trajectory.invalid.component, trajectory.invalid.reason)
    return found


@pytest.mark.parametrize("name", CASES)
def test_agent_and_agent_loop_make_equal_trajectories(
    played: dict[str, tuple[Trajectory, Trajectory]], name: str
) -> None:
    case = CASES[name]
    by_loop, by_agent = played[name]
    assert by_loop.finish_reason is case.reason
    assert by_loop.excluded is case.excluded
    assert by_loop.sampled_tokens > 0
    assert contents(by_agent) == contents(by_loop)
