"""Failures of engine, sandbox, tool and checker at any moment.

An error of infrastructure never becomes a reward. A hanging tool or checker ends the episode at its
time limit, with the reward of the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl_loop import infrastructure
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.config.episode import EpisodeLimits, PurificationConfig
from rl_loop.config.rollout import RolloutConfig
from rl_loop.data.credit import assign_advantages
from rl_loop.data.samples import to_samples
from rl_loop.data.trajectory import (
    FinishReason,
    InvalidReason,
    Trajectory,
    TrajectoryGroup,
    WeightVersionSpan,
)
from rl_loop.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    ModelShape,
    SamplingParams,
    check_routes,
)
from rl_loop.environments import RewardConfig, Task
from rl_loop.environments.base import Environment, StepResult
from rl_loop.environments.retool import ReToolEnvironment
from rl_loop.environments.tool_calls import ToolError
from rl_loop.harmony.codec import Harmony, ParsedMessage
from rl_loop.infrastructure import (
    COMPONENTS,
    CircuitBreaker,
    EngineError,
    InfrastructureError,
    InfrastructureOutageError,
)
from rl_loop.rollout import agent, turn_sampler
from rl_loop.rollout.agent import run_episode
from rl_loop.rollout.group_stream import GroupRequest, GroupStream, run_groups
from rl_loop.rollout.purification import purifying
from rl_loop.tracking.metrics import StepMetrics
from rl_loop.tracking.step_metrics import add_rollout_metrics
from tests.support.rl_loop.scripted_engine import ScriptedEngine
from tests.support.waiting import PATIENCE_SECONDS

TASK = Task("t", [{"role": "user", "content": "What is 17*23?"}], "391")
LIMITS = EpisodeLimits(max_turns=6, max_episode_tokens=3000, max_episode_seconds=20)
SHAPE = ModelShape(640)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the number of attempts, but shorten the pauses between them."""
    monkeypatch.setattr(turn_sampler, "FAULT_RETRY_DELAYS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(turn_sampler, "ABORT_RETRY_DELAYS", (0.0,) * 8)
    monkeypatch.setattr(turn_sampler, "ABORT_SECONDS", 0.1)
    monkeypatch.setattr(agent, "TOOL_RETRY_DELAYS", (0.0, 0.0, 0.0))


def call(harmony: Harmony, *codes: str) -> list[int]:
    messages = [ParsedMessage("analysis", "python", "code", code) for code in codes]
    return harmony.render_assistant(messages, "<|call|>")


def malformed_turn(harmony: Harmony) -> list[int]:
    """Return a turn that ends with a format error, which the environment scores."""
    return [*harmony.vocabulary.encode_text("what?"), harmony.stop_token_ids[0]]


def answer(harmony: Harmony, value: str = "391") -> list[int]:
    return harmony.render_assistant(
        [ParsedMessage("final", None, None, rf"\boxed{{{value}}}")], "<|return|>"
    )


class Answer:
    """Scripted result of the interpreter."""

    output, exit_code, error = "391\n", 0, None


async def interpreter(code: str) -> Any:
    return Answer()


def play(
    harmony: Harmony,
    engine: Any,
    environment: Environment | None = None,
    limits: EpisodeLimits = LIMITS,
    **options: Any,
) -> Trajectory:
    environment = environment or ReToolEnvironment(TASK, interpreter, RewardConfig())
    settings: dict[str, Any] = {"seed": 1, "record_routes": True, "shape": SHAPE, **options}

    async def main() -> Trajectory:
        before = asyncio.all_tasks()
        async with asyncio.timeout(30):
            episode = await run_episode(
                "t", environment, engine, harmony, limits, SamplingParams(500), **settings
            )
        assert asyncio.all_tasks() == before, "an episode that has ended leaves a task behind"
        return episode

    return asyncio.run(main())


def check_invalid(episode: Trajectory, component: str) -> None:
    """Check that an episode names its failing component and cannot be trained on."""
    assert episode.invalid is not None
    assert episode.invalid.component == component
    assert episode.invalid.reason
    assert math.isnan(episode.reward)
    assert episode.excluded
    with pytest.raises(ValueError, match="it ended with an infrastructure failure"):
        to_samples([TrajectoryGroup("t", [episode])], AlgorithmConfig(), version=0)


# ---- engines


def changed_result(**changes: Any) -> Callable[[GenerateRequest, GenerateResult], GenerateResult]:
    """Return a change of some fields of a result.

    Args:
        changes: new values by field, or functions of the true value.
    """

    def change(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        changed = {
            name: new(getattr(result, name)) if callable(new) else new
            for name, new in changes.items()
        }
        return replace(result, **changed)

    return change


def replace_first(value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [value, *values[1:]]


def raising_engine(
    error: BaseException,
) -> Callable[[GenerateRequest, GenerateResult], GenerateResult]:
    def fail(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        raise error

    return fail


def too_many_tokens(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    count = request.sampling.max_new_tokens + 1
    return replace(
        result, output_ids=[1] * count, output_log_probs=[-1.0] * count, weight_versions=[]
    )


def tokens_after_a_stop(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    stop = request.sampling.stop_token_ids[0]
    return replace(
        result,
        output_ids=[stop, stop],
        output_log_probs=[-1.0] * 2,
        weight_versions=[],
        routed_experts=None,
    )


ENGINE_FAULTS: dict[str, Callable[[GenerateRequest, GenerateResult], Any]] = {
    "NaN": changed_result(output_log_probs=replace_first(math.nan)),
    "minus infinity": changed_result(output_log_probs=replace_first(-math.inf)),
    "infinity": changed_result(output_log_probs=replace_first(math.inf)),
    "None": changed_result(output_log_probs=replace_first(None)),
    "text for a number": changed_result(output_log_probs=replace_first("-1.0")),
    "positive": changed_result(output_log_probs=replace_first(0.01)),
    "fewer log-probs": changed_result(output_log_probs=lambda values: values[1:]),
    "more log-probs": changed_result(output_log_probs=lambda values: [*values, -1.0]),
    "id of the vocabulary's size": changed_result(output_ids=replace_first(640)),
    "negative id": changed_result(output_ids=replace_first(-1)),
    "None for an id": changed_result(output_ids=replace_first(None)),
    "a fraction for an id": changed_result(output_ids=replace_first(1.5)),
    "more tokens than requested": too_many_tokens,
    "tokens after a stop": tokens_after_a_stop,
    "nothing and no abort": changed_result(
        output_ids=[], output_log_probs=[], weight_versions=[], routed_experts=None
    ),
    "unknown finish reason": changed_result(finish_reason=FinishReason.MAX_TURNS),
    "endless aborts": changed_result(
        output_ids=[],
        output_log_probs=[],
        weight_versions=[],
        routed_experts=None,
        finish_reason=FinishReason.ABORT,
    ),
    "no routes": changed_result(routed_experts=None),
    "routes of other tokens": changed_result(routed_experts=lambda routes: routes[1:]),
    "routes of one dimension": changed_result(routed_experts=lambda routes: routes.reshape(-1)),
    "routes of wide numbers": changed_result(routed_experts=lambda routes: routes.astype(np.int64)),
    "routes that are fractions": changed_result(
        routed_experts=lambda routes: routes.astype(np.float32)
    ),
    "versions of fewer tokens": changed_result(weight_versions=[WeightVersionSpan(0, 1, 1)]),
    "versions with a hole": changed_result(
        weight_versions=[WeightVersionSpan(0, 1, 1), WeightVersionSpan(2, 3, 1)]
    ),
    "no result": lambda request, result: None,
    "RuntimeError": raising_engine(RuntimeError("CUDA error: an illegal memory access")),
    "ConnectionError": raising_engine(ConnectionResetError("peer")),
    "ValueError": raising_engine(ValueError("the model has 10 positions")),
    "TimeoutError": raising_engine(TimeoutError()),
    "MemoryError": raising_engine(MemoryError()),
}


class FaultyEngine(ScriptedEngine):
    """An engine with ``times`` injected faults, from request ``moment`` on."""

    def __init__(self, turns: list[list[int]], fault: str, moment: int, times: int = 1000) -> None:
        super().__init__(turns)
        self.fault, self.moment, self.times = fault, moment, times
        self.calls = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.calls += 1
        faulty = self.calls >= self.moment and self.times > 0
        turns = [list(turn) for turn in self._turns]
        result = await super().generate(request)
        if not faulty:
            return result
        self.times -= 1
        # Undo the request, so that a retry samples the same turn.
        self._turns = turns
        self.requests.pop()
        self.results.pop()
        self._processed = []
        changed: GenerateResult = ENGINE_FAULTS[self.fault](request, result)
        return changed


@pytest.mark.parametrize("moment", [1, 2, 3])
@pytest.mark.parametrize("fault", ENGINE_FAULTS)
def test_engine_fault_makes_the_episode_invalid_and_is_named(
    tiny: Harmony, fault: str, moment: int
) -> None:
    engine = FaultyEngine([call(tiny, "1"), call(tiny, "2"), answer(tiny)], fault, moment)
    episode = play(tiny, engine)
    check_invalid(episode, "engine")
    assert f"request t/1/{moment - 1}/0" in episode.invalid.reason  # type: ignore[union-attr]
    assert engine.calls <= moment + 8, "a faulty engine is not asked for ever"


@pytest.mark.parametrize("moment", [1, 2, 3])
@pytest.mark.parametrize("fault", sorted(ENGINE_FAULTS.keys() - {"ValueError"}))
def test_two_engine_faults_are_retried_without_loss(tiny: Harmony, fault: str, moment: int) -> None:
    turns = [call(tiny, "1"), call(tiny, "2"), answer(tiny)]
    episode = play(tiny, FaultyEngine(turns, fault, moment, times=2))
    undisturbed = play(tiny, ScriptedEngine(turns))
    assert episode.invalid is None
    assert episode.reward == 1.0
    assert np.array_equal(episode.token_ids, undisturbed.token_ids)
    assert np.array_equal(episode.rollout_log_probs, undisturbed.rollout_log_probs)


def test_experts_of_routes_are_checked_when_known(tiny: Harmony) -> None:
    engine = ScriptedEngine([answer(tiny)])  # its routes are not a choice of 2 among 4 experts
    check_invalid(play(tiny, engine, shape=ModelShape(640, layers=1, top_k=2, experts=4)), "engine")
    check_invalid(
        play(tiny, ScriptedEngine([answer(tiny)]), shape=ModelShape(640, layers=2)), "engine"
    )


@pytest.mark.parametrize(
    "choice",
    [[3, 3], [-1, 0], [0, 4], [4, 0]],
    ids=["expert twice", "negative expert first", "unknown expert last", "unknown expert first"],
)
@pytest.mark.parametrize("token", [0, 4])
def test_impossible_choice_of_experts_is_named(choice: list[int], token: int) -> None:
    routes = np.tile(np.array([2, 0], np.int16), (5, 3, 1))
    assert check_routes(routes, experts=4) is routes
    routes[token, 2] = choice
    with pytest.raises(RuntimeError, match=rf"of layer 2 .* of 4 experts at token {token}\."):
        check_routes(routes, experts=4)


class HangingEngine(ScriptedEngine):
    """An engine that hangs in requests and aborts. If ``begins``, it reports the begin."""

    def __init__(self, begins: bool) -> None:
        super().__init__([])
        self.begins = begins

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if self.begins and request.on_begin is not None:
            request.on_begin()
        await asyncio.Event().wait()
        raise AssertionError

    async def abort(self, request_id: str | None = None) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("begins", [True, False])
def test_hanging_engine_makes_the_episode_invalid(
    tiny: Harmony, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_sampler, "QUEUE_SECONDS", 0.1)
    limits = LIMITS.model_copy(update={"max_episode_seconds": 0.05})
    check_invalid(play(tiny, HangingEngine(begins), limits=limits), "engine")


# ---- environments


class FaultyEnvironment(ReToolEnvironment):
    """An environment that calls ``instead`` in place of one of its methods."""

    def __init__(self, method: str, instead: Callable[[], Any], times: int = 1000) -> None:
        super().__init__(TASK, interpreter, RewardConfig())
        self._calls_of_method = [0]
        original = getattr(self, method)
        is_async = asyncio.iscoroutinefunction(original)

        def act(*arguments: Any) -> Any:
            if self._calls_of_method[0] >= times:
                return original(*arguments)
            self._calls_of_method[0] += 1
            return instead()

        async def act_async(*arguments: Any) -> Any:
            result = act(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        self.FIXED = (*Environment.FIXED, method, "_calls_of_method")  # type: ignore[misc]
        setattr(self, method, act_async if is_async else act)


def raising(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


ENVIRONMENT_FAULTS: dict[str, Callable[[], Any]] = {
    "connection refused": raising(ConnectionRefusedError(111, "Connection refused")),
    "raises TimeoutError": raising(TimeoutError()),
    "raises KeyError": raising(KeyError("x")),
    "raises MemoryError": raising(MemoryError()),
    "raises RecursionError": raising(RecursionError("maximum recursion depth exceeded")),
    "raises InfrastructureError": raising(InfrastructureError("sandbox", "no bubblewrap")),
    "returns None": lambda: None,
}
COMPONENT_OF_METHOD = {
    "step": "environment",
    "call": "tool",
    "answer": "checker",
    "end_truncated": "environment",
}


@pytest.mark.parametrize("failure", ENVIRONMENT_FAULTS)
@pytest.mark.parametrize("method", COMPONENT_OF_METHOD)
def test_failing_environment_method_makes_the_episode_invalid(
    tiny: Harmony, method: str, failure: str
) -> None:
    turns = [call(tiny, "1"), answer(tiny)]
    limits = LIMITS.model_copy(update={"max_turns": 1 if method == "end_truncated" else 6})
    episode = play(
        tiny, ScriptedEngine(turns), FaultyEnvironment(method, ENVIRONMENT_FAULTS[failure]), limits
    )
    component = "sandbox" if "Infrastructure" in failure else COMPONENT_OF_METHOD[method]
    if failure == "returns None" and method == "answer":
        component = "environment"
    check_invalid(episode, component)


@pytest.mark.parametrize("method", ["prompt", "tools", "builtin_tools", "end_with_format_error"])
def test_failing_prompt_or_format_error_invalidates_the_episode(tiny: Harmony, method: str) -> None:
    illegal = [[*tiny.vocabulary.encode_text("what?"), tiny.stop_token_ids[0]]]
    environment = FaultyEnvironment(method, ENVIRONMENT_FAULTS["raises KeyError"])
    check_invalid(play(tiny, ScriptedEngine(illegal), environment), "environment")


@pytest.mark.parametrize("method", ["step", "call", "answer"])
def test_transient_failure_is_retried_from_the_same_state(tiny: Harmony, method: str) -> None:
    environment = FaultyEnvironment(method, ENVIRONMENT_FAULTS["connection refused"], times=2)
    episode = play(tiny, ScriptedEngine([call(tiny, "1", "2"), answer(tiny)]), environment)
    assert (episode.invalid, episode.reward, episode.tool_calls) == (None, 1.0, 2)
    assert environment._calls == 2


def test_actions_before_a_failure_are_undone_before_the_retry(
    tiny: Harmony,
) -> None:
    class FailsInTheMiddle(ReToolEnvironment):
        FIXED = (*Environment.FIXED, "failures")
        failures = 0

        async def call(self, tool: str, arguments: str) -> Any:
            if self._calls == 1 and self.failures == 0:
                self.failures = 1
                raise ConnectionRefusedError(111, "Connection refused")
            return await super().call(tool, arguments)

    environment = FailsInTheMiddle(TASK, interpreter, RewardConfig())
    episode = play(tiny, ScriptedEngine([call(tiny, "1", "2"), answer(tiny)]), environment)
    assert (episode.invalid, episode.reward, environment.failures) == (None, 1.0, 1)
    # The call of "1" before the failure left no state.
    assert environment._calls == 2


def test_failing_open_of_an_environment_is_retried(tiny: Harmony) -> None:
    opened: list[int] = []

    class OpensLate(ReToolEnvironment):
        async def open(self) -> None:
            opened.append(1)
            if len(opened) <= len(agent.TOOL_RETRY_DELAYS):
                raise ConnectionRefusedError(111, "Connection refused")

    environment = OpensLate(TASK, interpreter, RewardConfig())
    episode = play(tiny, ScriptedEngine([call(tiny, "1"), answer(tiny)]), environment)
    assert (episode.invalid, episode.reward) == (None, 1.0)
    assert len(opened) == 1 + len(agent.TOOL_RETRY_DELAYS)


def test_environment_without_saved_state_is_not_retried(tiny: Harmony) -> None:
    class Remote(FaultyEnvironment):
        def save_state(self) -> None:
            return None

    environment = Remote("call", ENVIRONMENT_FAULTS["connection refused"], times=1)
    check_invalid(play(tiny, ScriptedEngine([call(tiny, "1"), answer(tiny)]), environment), "tool")
    assert environment._calls_of_method == [1]


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, "1"])
def test_reward_that_is_not_a_number_is_a_checker_failure(tiny: Harmony, reward: Any) -> None:
    async def judge() -> StepResult:
        return StepResult(done=True, reward=reward, reward_parts={"correct": 1.0})

    episode = play(tiny, ScriptedEngine([answer(tiny)]), FaultyEnvironment("answer", judge))
    check_invalid(episode, "checker")


async def hang() -> Any:
    await asyncio.Event().wait()


episode_ended = threading.Event()
"""Set by a test when its episode has ended, to release the hanging calls."""


async def hang_despite_cancellation() -> Any:
    """Ignore cancellation until the episode has ended."""
    while not episode_ended.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


async def hang_on_a_thread() -> Any:
    await asyncio.to_thread(episode_ended.wait)


@pytest.mark.parametrize("how", [hang, hang_on_a_thread])
@pytest.mark.parametrize("method", ["step", "call", "answer"])
def test_hanging_tool_or_checker_times_out_the_episode(
    tiny: Harmony, method: str, how: Callable[[], Any]
) -> None:
    episode_ended.clear()
    limits = LIMITS.model_copy(update={"max_episode_seconds": 0.2})
    engine = ScriptedEngine([answer(tiny) if method == "answer" else call(tiny, "1"), answer(tiny)])
    environment = FaultyEnvironment(method, how)

    async def main() -> tuple[Trajectory, float]:
        began = time.monotonic()
        run = run_episode("t", environment, engine, tiny, limits, SamplingParams(500), seed=1)
        try:
            episode = await asyncio.wait_for(run, PATIENCE_SECONDS)
            return episode, time.monotonic() - began
        finally:
            episode_ended.set()

    episode, seconds = asyncio.run(main())
    assert (episode.finish_reason, episode.invalid, episode.reward) == (
        FinishReason.TIMEOUT,
        None,
        -1.0,
    )
    assert seconds > 0.15


def test_slow_end_of_an_episode_out_of_time_keeps_its_reward(
    tiny: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may delay every method, so the time of an episode does not limit its end."""
    limits = LIMITS.model_copy(update={"max_episode_seconds": 0.2})

    def play_with_slow_end() -> Trajectory:
        environment = FaultyEnvironment("end_truncated", slow_end)
        engine = ScriptedEngine([answer(tiny)], hang=True)
        return play(tiny, engine, environment, limits)

    def slow_end() -> StepResult:
        time.sleep(0.5)
        return StepResult(done=True, reward=-0.5)

    episode = play_with_slow_end()
    assert (episode.finish_reason, episode.invalid) == (FinishReason.TIMEOUT, None)
    assert episode.reward == -0.5

    monkeypatch.setattr("rl_loop.rollout.environment_guard.METHOD_SECONDS", 0.0)
    check_invalid(play_with_slow_end(), "environment")


def test_hanging_scorers_leave_other_episodes_valid(tiny: Harmony) -> None:
    """Each hanging scorer occupies one of the few default threads."""
    limits = LIMITS.model_copy(update={"max_episode_seconds": 2})
    environment = ReToolEnvironment(TASK, interpreter, RewardConfig())

    async def main() -> Trajectory:
        released = threading.Event()
        loop = asyncio.get_running_loop()
        hung = [loop.run_in_executor(None, released.wait, 60) for _ in range(200)]
        try:
            sampled = ScriptedEngine([malformed_turn(tiny)])
            return await run_episode(
                "t", environment, sampled, tiny, limits, SamplingParams(500), seed=1
            )
        finally:
            released.set()
            await asyncio.gather(*hung)

    episode = asyncio.run(main())
    assert episode.invalid is None, episode.invalid
    assert episode.reward == -1.0


def test_uncancellable_tool_does_not_delay_its_episodes_end(
    tiny: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode_ended.clear()
    monkeypatch.setattr("rl_loop.rollout.episode_clock.CANCEL_SECONDS", 0.1)
    environment = FaultyEnvironment("call", hang_despite_cancellation)
    limits = LIMITS.model_copy(update={"max_episode_seconds": 0.2})
    run = run_episode(
        "t",
        environment,
        ScriptedEngine([call(tiny, "1")]),
        tiny,
        limits,
        SamplingParams(500),
        seed=1,
    )

    async def main() -> Trajectory:
        # The tool hangs until the event is set, so an episode that waits for the tool never ends.
        release = threading.Timer(PATIENCE_SECONDS, episode_ended.set)
        release.start()
        try:
            episode = await run
            assert not episode_ended.is_set()
            return episode
        finally:
            release.cancel()
            episode_ended.set()

    assert asyncio.run(main()).finish_reason is FinishReason.TIMEOUT


def test_tool_failure_in_purification_makes_the_episode_invalid(tiny: Harmony) -> None:
    programs = 0

    async def execute(code: str) -> Any:
        nonlocal programs
        programs += 1
        if programs > 1:
            raise ConnectionRefusedError
        raise ToolError("SyntaxError")

    environment = ReToolEnvironment(TASK, execute, RewardConfig())
    engine = ScriptedEngine([call(tiny, "print(1"), call(tiny, "print(1)"), answer(tiny)])
    check_invalid(
        play(tiny, engine, environment, make_runner=purifying(PurificationConfig())), "tool"
    )


def test_invalid_scores_in_purification_are_an_engine_fault(tiny: Harmony) -> None:
    class BadScores(ScriptedEngine):
        scores: Any = None

        async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
            return [self.scores] * (len(input_ids) - 1) if self.scores is not None else [-1.0]

    async def execute(code: str) -> Any:
        if code.endswith(")"):
            return Answer()
        raise ToolError("SyntaxError")

    for bad in (None, math.nan, 1.0):
        engine = BadScores([call(tiny, "print(1"), call(tiny, "print(1)"), answer(tiny)])
        engine.scores = bad
        environment = ReToolEnvironment(TASK, execute, RewardConfig())
        check_invalid(
            play(tiny, engine, environment, make_runner=purifying(PurificationConfig())), "engine"
        )


# ---- clocks


def test_wait_in_the_engine_queue_is_not_episode_time(tiny: Harmony) -> None:
    """32 requests run in sequence for 0.1 s each, so the last episode waits beyond its limit."""
    slot = asyncio.Semaphore(1)

    class OneAtATime(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            async with slot:
                assert request.on_begin is not None
                request.on_begin()
                await asyncio.sleep(0.1)
                return await super().generate(replace(request, on_begin=None))

    limits = LIMITS.model_copy(update={"max_episode_seconds": 1.5})

    async def main() -> list[Trajectory]:
        runs = []
        for seed in range(16):
            engine = OneAtATime([call(tiny, "1"), answer(tiny)])
            environment = ReToolEnvironment(TASK, interpreter, RewardConfig())
            runs.append(
                run_episode("t", environment, engine, tiny, limits, SamplingParams(500), seed=seed)
            )
        return await asyncio.gather(*runs)

    began = time.monotonic()
    episodes = asyncio.run(main())
    assert time.monotonic() - began > 2 * 1.5, (
        "the requests must wait longer than the episode's limit"
    )
    assert {episode.finish_reason for episode in episodes} == {FinishReason.STOP}
    turns = [turn for episode in episodes for turn in episode.turns if turn.role == "assistant"]
    assert max(turn.waited for turn in turns) > 1
    assert all(0.1 <= turn.seconds < 1.5 for turn in turns)


# ---- limits of every call


@pytest.mark.parametrize("sizes", [(6,), (3, 3), (4,), (1, 1, 1, 1), (2, 6)])
def test_call_limit_holds_for_any_spread_of_calls_over_turns(
    tiny: Harmony, sizes: tuple[int, ...]
) -> None:
    run: list[str] = []

    async def execute(code: str) -> Any:
        run.append(code)
        return Answer()

    turns = [call(tiny, *(f"{turn}-{i}" for i in range(size))) for turn, size in enumerate(sizes)]
    limits = LIMITS.model_copy(update={"max_tool_calls": 4})
    environment = ReToolEnvironment(TASK, execute, RewardConfig())
    episode = play(tiny, ScriptedEngine([*turns, answer(tiny)]), environment, limits)
    assert run == [f"{turn}-{i}" for turn, size in enumerate(sizes) for i in range(size)][:4]
    assert (episode.finish_reason, episode.tool_calls) == (FinishReason.MAX_TOOL_CALLS, 4)
    assert episode.reward == -1.0


def test_retries_of_failed_calls_count_towards_the_limit(tiny: Harmony) -> None:
    run: list[str] = []

    async def execute(code: str) -> Any:
        run.append(code)
        raise ToolError("SyntaxError")

    limits = LIMITS.model_copy(update={"max_tool_calls": 3})
    environment = ReToolEnvironment(TASK, execute, RewardConfig())
    engine = ScriptedEngine([call(tiny, "x")] * 12)
    episode = play(
        tiny, engine, environment, limits, make_runner=purifying(PurificationConfig(retries=9))
    )
    assert len(run) == 3
    assert episode.finish_reason is FinishReason.MAX_TOOL_CALLS


# ---- invalid episodes


def valid(reward: float) -> Trajectory:
    episode = Trajectory(
        "t",
        token_ids=[1, 2],
        loss_mask=[0, 1],
        rollout_log_probs=[0.0, -1.0],
        reward=reward,
        reward_parts={"correct": 0.0},
    )
    episode.weight_versions = [WeightVersionSpan(1, 2, 0)]
    return episode


def failed(component: str = "tool", reason: str = "Connection refused") -> Trajectory:
    return Trajectory(
        "t",
        token_ids=[1],
        loss_mask=[0],
        rollout_log_probs=[0.0],
        reward=math.nan,
        invalid=InvalidReason(component, reason),
    )


def test_group_baseline_uses_only_valid_episodes() -> None:
    config = AlgorithmConfig.model_validate({"advantage": "dr_grpo"})
    whole = [TrajectoryGroup("t", [valid(1.0), valid(0.0)])]
    disturbed = [
        TrajectoryGroup("t", [valid(1.0), valid(0.0)], invalid=[failed(), failed("engine")])
    ]
    advantages: list[Any] = []
    for groups in (whole, disturbed):
        samples = assign_advantages(to_samples(groups, config, 0), groups, config, 100)
        advantages.append(samples.advantages)
    for column in advantages:
        assert column.tolist() == [0.0, 0.5, 0.0, -0.5]


def test_group_with_one_valid_episode_has_zero_advantage() -> None:
    config = AlgorithmConfig()
    groups = [
        TrajectoryGroup("t", [valid(1.0)], invalid=[failed()]),
        TrajectoryGroup("u", [], invalid=[failed()]),
    ]
    samples = assign_advantages(to_samples(groups, config, 0), groups, config, 100)
    assert samples.advantages is not None
    assert samples.advantages.tolist() == [0.0, 0.0]


def test_invalid_episodes_are_counted_by_component() -> None:
    metrics = StepMetrics(0)
    groups = [
        TrajectoryGroup("t", [valid(1.0), valid(1.0)], invalid=[failed("tool"), failed("engine")]),
        TrajectoryGroup("u", [], skipped="the prompt of task u has 9 tokens"),
    ]
    add_rollout_metrics(metrics, groups)
    values = metrics.values()
    assert (
        values["rollout/invalid_fraction/tool"] == values["rollout/invalid_fraction/engine"] == 0.25
    )
    assert values["rollout/invalid_fraction/checker"] == 0.0
    assert values["rollout/invalid_fraction"] == 0.5
    assert {f"rollout/invalid_fraction/{component}" for component in COMPONENTS} <= values.keys()
    assert values["rollout/skipped_tasks"] == 0.5
    assert values["reward"] == 1.0


def test_share_of_invalid_episodes_has_a_metric_per_cause() -> None:
    causes = [
        ("sandbox", "server hung"),
        ("sandbox", "server hung"),
        ("sandbox", "machine out of memory"),
        ("tool", "tool server http://a:1/mcp"),
        ("engine", ""),
    ]
    invalid_episodes = [
        replace(failed(), invalid=InvalidReason(c, "reason", failure_source))
        for c, failure_source in causes
    ]
    metrics = StepMetrics(0)
    add_rollout_metrics(metrics, [TrajectoryGroup("t", [valid(1.0)] * 5, invalid=invalid_episodes)])
    shares = {
        name: value
        for name, value in metrics.values().items()
        if name.startswith("rollout/invalid_fraction") and value > 0
    }
    assert shares == {
        "rollout/invalid_fraction": 0.5,
        "rollout/invalid_fraction/sandbox": 0.3,
        "rollout/invalid_fraction/sandbox/server_hung": 0.2,
        "rollout/invalid_fraction/sandbox/machine_out_of_memory": 0.1,
        "rollout/invalid_fraction/tool": 0.1,
        "rollout/invalid_fraction/tool/tool_server_http_a_1_mcp": 0.1,
        "rollout/invalid_fraction/engine": 0.1,
    }


def test_breaker_ends_a_run_by_share_or_streak() -> None:
    breaker = CircuitBreaker(max_fraction=0.2, max_streak=64)
    for number in range(10):
        breaker.observe(
            TrajectoryGroup(
                "t", [valid(0.0)] * 7, invalid=[failed("tool", "refused")] * (number < 3)
            )
        )
    breaker.check_fraction()
    for _ in range(3):
        breaker.observe(TrajectoryGroup("t", [], invalid=[failed("engine", "NaN")] * 8))
    message = r"27 of 97 episodes \(rollout.max_invalid_fraction is 0.2\): engine in 24, such as: NaN; tool in 3"
    with pytest.raises(InfrastructureOutageError, match=message) as outage:
        breaker.check_fraction()
    assert "\n" not in str(outage.value)

    # A share equal to the limit is accepted.
    exact = CircuitBreaker(max_fraction=0.25, max_streak=None)
    exact.observe(TrajectoryGroup("t", [valid(0.0)] * 3, invalid=[failed()]))
    exact.check_fraction()

    # The reasons differ, but most of them have the same source.
    servers = CircuitBreaker(max_fraction=0.0, max_streak=None)
    invalid_episodes = [
        replace(failed(), invalid=InvalidReason("tool", f"request {n} is lost", f"server {n // 5}"))
        for n in range(6)
    ]
    servers.observe(TrajectoryGroup("t", [], invalid=invalid_episodes))
    with pytest.raises(
        InfrastructureOutageError, match=r"tool in 6 \(server 0 in 5\), such as: request 0 is lost"
    ):
        servers.check_fraction()

    streak = CircuitBreaker(max_fraction=0.9, max_streak=20)
    # One valid episode ends a streak. A new streak may follow.
    streak.observe(TrajectoryGroup("t", [], invalid=[failed()] * 19))
    streak.observe(TrajectoryGroup("t", [valid(0.0)], invalid=[failed()] * 19))
    streak.observe(TrajectoryGroup("t", [], invalid=[failed()] * 19))
    with pytest.raises(InfrastructureOutageError, match=r"20 in a row, and the limit is 20"):
        streak.observe(TrajectoryGroup("t", [], invalid=[failed()]))


class ImmediateRunner:
    """Runner whose groups end when they are admitted."""

    def __init__(self, *groups: TrajectoryGroup) -> None:
        self.groups = groups

    def stream(self) -> GroupStream:
        return GroupStream(lambda admitted: admitted.end(self.groups[admitted.number]))


@pytest.mark.parametrize(
    ("invalid_groups", "limit"),
    [((1, 2), "16 in a row"), ((0, 2), "16 of 32 .*max_invalid_fraction is 0.4"), ((3,), None)],
)
def test_run_groups_raises_at_too_many_invalid_episodes(
    invalid_groups: tuple[int, ...], limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [
        TrajectoryGroup(str(number), [], invalid=[failed()] * 8)
        if number in invalid_groups
        else TrajectoryGroup(str(number), [valid(0.0)] * 8)
        for number in range(4)
    ]
    monkeypatch.setattr(infrastructure, "MAX_STREAK", 16)
    rollout = RolloutConfig.model_construct(max_invalid_fraction=0.4)
    requests = [GroupRequest(None, tuple(range(8)), 1.0)] * 4  # type: ignore[arg-type]
    if limit is None:
        assert run_groups(ImmediateRunner(*groups), requests, rollout) == groups
        return
    with pytest.raises(InfrastructureOutageError, match=limit):
        run_groups(ImmediateRunner(*groups), requests, rollout)


def test_pickled_failures_keep_all_fields() -> None:
    for failure in (
        InfrastructureError("tool", "x"),
        EngineError("r/1", "NaN", "http://a"),
        InfrastructureOutageError("y"),
    ):
        copied = pickle.loads(pickle.dumps(failure))
        assert (type(copied), str(copied), vars(copied)) == (
            type(failure),
            str(failure),
            vars(failure),
        )
