"""Purification: a successful retry replaces a failed call, and spliced turns are marked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.config.episode import EpisodeLimits, PurificationConfig
from rl_loop.data.samples import to_samples
from rl_loop.data.trajectory import FinishReason, Trajectory, TrajectoryGroup
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments import RewardConfig, Task
from rl_loop.environments.retool import ReToolEnvironment
from rl_loop.harmony.codec import Harmony, ParsedMessage
from rl_loop.rollout import purification
from rl_loop.rollout.agent import run_episode
from tests.support.rl_loop.scripted_engine import ScriptedEngine, log_prob_at

TASK = Task(
    "t", [{"role": "user", "content": "What is 17*23?"}], "391", metadata={"stateful": True}
)


@dataclass
class Output:
    output: str
    exit_code: int = 0
    error: str | None = None
    interpreter_ended: bool = False


def think(harmony: Harmony, thought: str, code: str) -> list[int]:
    messages = [
        ParsedMessage("analysis", None, None, thought),
        ParsedMessage("analysis", "python", "code", code),
    ]
    return harmony.render_assistant(messages, "<|call|>")


def answer(harmony: Harmony) -> list[int]:
    return harmony.render_assistant(
        [ParsedMessage("final", None, None, r"\boxed{391}")], "<|return|>"
    )


def episode(
    harmony: Harmony,
    turns: list[list[int]],
    config: PurificationConfig | None,
    max_tokens: int = 2000,
) -> tuple[Trajectory, ScriptedEngine, list[str]]:
    engine, programs = ScriptedEngine(turns), []

    async def execute(code: str, history: Sequence[str] = ()) -> Output:
        programs.append("\n".join([*history, code]))
        return Output("391\n") if code.endswith("print(17*23)") else Output("SyntaxError\n", 1)

    environment = ReToolEnvironment(TASK, execute, RewardConfig())
    engine.environment = environment  # type: ignore[attr-defined]
    limits = EpisodeLimits(max_turns=8, max_episode_tokens=max_tokens, max_episode_seconds=60)
    done = asyncio.run(
        run_episode(
            "t",
            environment,
            engine,
            harmony,
            limits,
            SamplingParams(500),
            seed=1,
            record_routes=True,
            make_runner=None if config is None else purification.purifying(config),
        )
    )
    return done, engine, programs


def test_similar_call_replaces_only_the_failed_call(tiny: Harmony) -> None:
    bad, good = think(tiny, "Use python.", "print(17*23"), think(tiny, "Again.", "print(17*23)")
    trajectory, engine, programs = episode(tiny, [bad, good, answer(tiny)], PurificationConfig())
    merged = think(tiny, "Use python.", "print(17*23)")
    prompt = engine.requests[0].input_ids
    tokens = trajectory.token_ids.tolist()
    assert tokens[len(prompt) : len(prompt) + len(merged)] == merged
    assert (
        engine.requests[2].input_ids[: len(prompt) + len(merged)] == prompt + merged
    )  # the error is not in the prompt
    assert trajectory.tool_errors == 0
    assert trajectory.tool_calls == 1
    assert trajectory.reward == 1
    assert programs[0] == "print(17*23"
    ((start, end),) = trajectory.spliced
    assert end == len(prompt) + len(merged)
    assert tiny.decode(tokens[start:end]).endswith("print(17*23)<|call|>")
    assert tiny.decode(tokens[:start]).endswith("Use python.<|end|>")
    # Log-probs are for the new positions. Versions are from the time of sampling.
    log_probs = trajectory.rollout_log_probs[start:end].tolist()
    assert log_probs == [log_prob_at(i) for i in range(start, end)]
    versions = {s.start: s.version for s in trajectory.weight_versions}
    assert versions[start] == 2
    assert versions[len(prompt)] == 1


def test_spliced_tokens_skip_correction_and_routing_replay(tiny: Harmony) -> None:
    turns = [
        think(tiny, "Use python.", "print(17*23"),
        think(tiny, "Again.", "print(17*23)"),
        answer(tiny),
    ]
    trajectory, _, _ = episode(tiny, turns, PurificationConfig())
    ((start, end),) = trajectory.spliced
    assert isinstance(trajectory.routed_experts, np.ndarray)
    # The last spliced token is first an input of the next turn, at its new position. The first
    # number of this engine's routes is the position of the token.
    positions = list(range(len(trajectory) - 1))
    positions[start : end - 1] = [-1] * (end - 1 - start)
    assert trajectory.routed_experts[:, 0, 0].tolist() == positions
    config = AlgorithmConfig(mini_batches=2, max_staleness=9)
    samples = to_samples([TrajectoryGroup("t", [trajectory])], config, version=3)
    assert samples.is_off_policy is not None and samples.staleness is not None
    assert np.flatnonzero(samples.is_off_policy).tolist() == list(range(start, end))
    assert not samples.staleness[start:end].any(), "where they stand they were not sampled"
    assert samples.staleness.any(), "others are stale"
    assert samples.loss_mask[start:end].all()


def test_dissimilar_call_replaces_the_whole_turn(
    tiny: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purification, "SIMILARITY", 0.9)
    bad, good = think(tiny, "Use python.", "x=1"), think(tiny, "Again.", "print(17*23)")
    trajectory, engine, _ = episode(tiny, [bad, good, answer(tiny)], PurificationConfig())
    prompt = len(engine.requests[0].input_ids)
    assert trajectory.token_ids[prompt : prompt + len(good)].tolist() == good
    assert trajectory.spliced == [(prompt, prompt + len(good))]


@pytest.mark.parametrize(("of_turn", "of_episode"), [(2, 30), (9, 2)])
def test_error_stays_as_sampled_after_the_last_retry(
    tiny: Harmony, of_turn: int, of_episode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purification, "MAX_RETRIES", of_episode)
    config = PurificationConfig(retries=of_turn)
    bad = think(tiny, "Use python.", "print(17*23")
    plain, _, _ = episode(tiny, [bad, answer(tiny)], None)
    kept, engine, programs = episode(tiny, [bad, bad, bad, answer(tiny)], config)
    assert len(programs) == 3
    assert len(engine.requests) == 4
    assert np.array_equal(kept.token_ids, plain.token_ids)
    assert np.array_equal(kept.rollout_log_probs, plain.rollout_log_probs)
    assert kept.tool_errors == 1
    assert not kept.spliced


def test_retry_without_a_call_keeps_the_error(tiny: Harmony) -> None:
    bad = think(tiny, "Use python.", "print(17*23")
    trajectory, _, _ = episode(tiny, [bad, answer(tiny), answer(tiny)], PurificationConfig())
    assert trajectory.tool_errors == 1
    assert trajectory.finish_reason is FinishReason.STOP


def test_environment_is_restored_before_the_new_call(tiny: Harmony) -> None:
    first = think(tiny, "Use python.", "print(17*23)")
    bad, good = think(tiny, "Again.", "x="), think(tiny, "Again.", "x=1;print(17*23)")
    _, engine, programs = episode(tiny, [first, bad, good, answer(tiny)], PurificationConfig())
    assert engine.environment._calls == 2  # type: ignore[attr-defined]
    assert (
        programs[2].count("print(17*23)") == 2
    )  # the history and the new call, without the failed call
    environment = ReToolEnvironment(TASK, None, RewardConfig())  # type: ignore[arg-type]
    state = environment.save_state()
    environment._history, environment.added = ("x",), 1  # type: ignore[attr-defined]
    environment.restore_state(state)
    assert environment._history == ()
    assert not hasattr(environment, "added")
    assert environment.task is TASK
