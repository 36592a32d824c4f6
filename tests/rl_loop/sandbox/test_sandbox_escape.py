"""Programs that try to end their episode early. Every episode must end with a reward.

The programs run in real sandboxes of a real rollout worker. Only the policy is scripted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.data.trajectory import Trajectory
from rl_loop.engines.protocol import GenerateRequest, GenerateResult
from rl_loop.environments import Task
from rl_loop.harmony.codec import ParsedMessage
from rl_loop.rollout import agent
from rl_loop.rollout.worker import RolloutWorker
from tests.support.rl_loop.sandbox.escape_programs import (
    ENDINGS,
    LIMIT_VALUES,
    LIMITS,
    OF_EACH_KIND,
    PROGRAMS,
    STEPS,
    program,
    set_limit,
)
from tests.support.rl_loop.scripted_engine import ScriptedEngine

CONFIG = Path(__file__).parents[3] / "configs/rl/tiny_retool.yaml"
SETTINGS = (
    "sandbox.servers=4", "sandbox.timeout_seconds=1",
    "sandbox.address_space_gb=0.27", "sandbox.total_memory_gb=0.27",
    "model.max_length=60000", "training.max_tokens_per_micro_batch=60000", "rollout.max_episode_tokens=60000",
    "rollout.max_sampled_tokens_per_turn=50000", "rollout.max_episode_seconds=300",
    "rollout.temperature=1",
)  # fmt: skip


class Policy:
    """A scripted policy that runs the programs of its task and then gives a wrong answer."""

    def __init__(self) -> None:
        self.turns: dict[str, list[list[int]]] = {}
        self._engines: dict[str, ScriptedEngine] = {}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        name = request.episode.rpartition("/")[0]
        if name not in self._engines:
            self._engines[name] = ScriptedEngine(self.turns[name])
        return await self._engines[name].generate(request)

    async def abort(self, request_id: str | None = None) -> None: ...

    async def close(self) -> None: ...


class ProgramRunner:
    """A rollout worker that runs one episode per session of programs."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._policy = Policy()
        config = load_config(CONFIG, RlConfig, list(SETTINGS))
        self.worker = RolloutWorker(config, lambda: self._policy, 1)  # type: ignore
        self._runner.run(self.worker.start())
        self._played = 0

    def play(self, *sessions: Sequence[str]) -> list[Trajectory]:
        """Run an episode for each session of programs, all concurrently."""
        return self._runner.run(self._gather(sessions))

    async def _gather(self, sessions: Sequence[Sequence[str]]) -> list[Trajectory]:
        return await asyncio.gather(*(self._play(programs) for programs in sessions))

    async def _play(self, programs: Sequence[str]) -> Trajectory:
        self._played += 1
        name = f"t{self._played}"
        codec = self.worker.codec
        turns = [
            codec.render_assistant([ParsedMessage("analysis", "python", "code", code)], "<|call|>")
            for code in programs
        ]
        answer = [ParsedMessage("final", None, None, r"\boxed{0}")]
        self._policy.turns[name] = [*turns, codec.render_assistant(answer, "<|return|>")]
        metadata = {"expression": "17*23", "stateful": len(programs) > 1}
        question = [{"role": "user", "content": "What is 17*23?"}]
        group = await self.worker.run_group(
            Task(name, question, "391", metadata=metadata), (0,), 1.0
        )
        [episode] = [*group.trajectories, *group.invalid]
        return episode

    def close(self) -> None:
        self._runner.run(self.worker.close())
        self._runner.close()


@pytest.fixture(scope="module")
def program_runner() -> Iterator[ProgramRunner]:
    made = ProgramRunner()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "TOOL_RETRY_DELAYS", (0.0, 0.0, 0.0))
        yield made
    made.close()


def check(episodes: Sequence[Trajectory], names: Sequence[str]) -> None:
    """Check that each episode has the reward of its wrong answer."""
    for episode, name in zip(episodes, names, strict=True):
        assert episode.invalid is None, f"{name}: {episode.invalid}"
        assert episode.reward == -1.0, name


def test_escape_program_of_each_kind_ends_with_a_reward(program_runner: ProgramRunner) -> None:
    check(program_runner.play(*([PROGRAMS[name]] for name in OF_EACH_KIND)), OF_EACH_KIND)


@pytest.mark.slow
def test_every_escape_program_ends_with_a_reward(program_runner: ProgramRunner) -> None:
    names = list(PROGRAMS)
    check(program_runner.play(*([PROGRAMS[name]] for name in names)), names)


limits = st.builds(
    lambda name, values: set_limit(name, min(values), max(values)),
    st.sampled_from(LIMITS),
    st.tuples(st.sampled_from(LIMIT_VALUES), st.sampled_from(LIMIT_VALUES)),
)
hostile = st.builds(
    lambda steps, ending: program(*steps, ending=ending),
    st.lists(st.one_of(limits, st.sampled_from(list(STEPS.values()))), max_size=4),
    st.sampled_from(list(ENDINGS.values())),
)
sessions = st.lists(hostile, min_size=1, max_size=2)
TRIED_TOGETHER = 12


def try_sessions(program_runner: ProgramRunner, tried: list[list[str]]) -> None:
    check(program_runner.play(*tried), ["\n--- next\n".join(programs) for programs in tried])


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(tried=st.lists(sessions, min_size=TRIED_TOGETHER, max_size=TRIED_TOGETHER))
def test_random_hostile_programs_end_with_a_reward(
    program_runner: ProgramRunner, tried: list[list[str]]
) -> None:
    try_sessions(program_runner, tried)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(tried=st.lists(sessions, min_size=TRIED_TOGETHER, max_size=TRIED_TOGETHER))
def test_many_random_hostile_programs_end_with_a_reward(
    program_runner: ProgramRunner, tried: list[list[str]]
) -> None:
    try_sessions(program_runner, tried)
