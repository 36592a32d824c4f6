"""Episodes with a judge: reward parts, invalid episodes, and the configuration."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_gptoss.user_error import UserError
from rl_loop import run_parts
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, check_reward_parts
from rl_loop.data.trajectory import FinishReason, TrajectoryGroup
from rl_loop.harmony.codec import ParsedMessage
from rl_loop.rewards import judge as judge_module
from rl_loop.rollout.worker import RolloutWorker
from rl_loop.run_parts import build_rollouts, build_tasks
from rl_loop.tasks.task_file import TaskFileError
from rl_loop.tracking.metrics import StepMetrics
from rl_loop.tracking.step_metrics import add_held_out_metrics, add_rollout_metrics
from tests.support.rl_loop.rewards.judge_server import JudgeServer, Reply, judging, says
from tests.support.rl_loop.scripted_engine import EngineOfMany

CONFIG = Path(__file__).parents[3] / "configs/rl/tiny_retool.yaml"
RUBRIC = "Correct is {ground_truth}. Short answers are better."


def settings(url: str, *overrides: str, rubric: str = RUBRIC) -> RlConfig:
    judge = f"{{url: '{url}', model: m, rubric: '{rubric}'}}"
    source = f"tasks.sources={{sums: {{environment: retool, judge: {judge}}}}}"
    return load_config(CONFIG, RlConfig, [source, *overrides])


def play(
    *replies: Reply, text: str | None = r"\boxed{391}", samples: int = 3
) -> tuple[TrajectoryGroup, JudgeServer]:
    """Run episodes that answer with a text, or that reach the limit of tokens."""

    async def run() -> tuple[TrajectoryGroup, JudgeServer]:
        async with judging(*replies) as server:
            config = settings(server.url)
            worker = RolloutWorker(config, lambda: EngineOfMany([]), 1)  # type: ignore
            final = [ParsedMessage("final", None, None, text or "1 " * 200)]
            turn = worker.codec.render_assistant(final, "<|return|>")
            worker.engine._turns = [turn]  # type: ignore[attr-defined]
            (task,) = build_tasks(config).train(0, 1)
            asked = replace(task, messages=[{"role": "user", "content": "What is 17*23?"}])
            try:
                group = await worker.run_group(asked, tuple(range(samples)), 1.0)
                return group, server
            finally:
                await worker._judges["sums"].close()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "RETRY_DELAYS", (0.0, 0.0, 0.0))


def parts_of(group: TrajectoryGroup) -> Sequence[tuple[float, float]]:
    assert group.invalid == []
    parts = [episode.reward_parts for episode in group.trajectories]
    return [(each["judge"], each["judge_unscored"]) for each in parts]


def test_score_is_a_reward_part_and_not_the_reward() -> None:
    group, server = play(says('{"score": 7}'))
    assert parts_of(group) == [(0.7, 0.0)] * 3
    # The answer is wrong for the task that was drawn, whatever the judge thinks.
    assert {episode.reward for episode in group.trajectories} == {-1.0}

    # Three equal answers are one question, with prompt, answer and rubric of the task.
    (request,) = server.requests
    question = request["messages"][1]["content"]
    assert "What is 17*23?" in question and r"\boxed{391}" in question
    assert re.search(r"Correct is \S+\. Short answers", question)
    assert "{ground_truth}" not in question


def test_failing_judge_makes_episodes_invalid() -> None:
    group, _ = play((503, "overloaded"))
    assert group.trajectories == []
    failures = {(one.component, one.failure_source) for one in map(_failure, group.invalid)}
    assert failures == {("checker", "judge")}
    assert "answered 503: overloaded" in _failure(group.invalid[0]).reason
    # NaN is unequal to itself.
    assert all(episode.reward != episode.reward for episode in group.invalid)


def _failure(episode):  # type: ignore[no-untyped-def]
    assert episode.invalid is not None
    return episode.invalid


def test_answer_that_the_judge_cannot_grade_scores_0() -> None:
    group, _ = play(says("no"), says('{"score": 3}'))
    assert parts_of(group) == [(0.0, 1.0)] * 3


def test_truncated_episode_scores_0_without_a_question() -> None:
    group, server = play(says('{"score": 9}'), text=None)
    assert {episode.finish_reason for episode in group.trajectories} == {FinishReason.LENGTH}
    assert parts_of(group) == [(0.0, 0.0)] * 3
    assert server.requests == []


def test_judge_of_a_source_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://localhost:1/v1"
    shaping = "algorithm.shaping={polite: {type: part, weight: 0.3, options: {name: judge}}}"
    config = settings(url, shaping)
    check_reward_parts(config, build_tasks(config).reward_parts())
    plain = load_config(CONFIG, RlConfig, [shaping])
    with pytest.raises(ConfigError, match="has the reward part judge"):
        check_reward_parts(plain, build_tasks(plain).reward_parts())

    with pytest.raises(TaskFileError, match=r"judge\.rubric: task .* has no truth\. Known"):
        build_tasks(settings(url, rubric="Correct is {truth}."))

    keyed = "tasks.sources.sums.judge.api_key_variable=NO_SUCH_KEY"
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    monkeypatch.setattr(run_parts, "build_backend", lambda *given: pytest.fail("an engine starts"))
    with pytest.raises(UserError, match="environment variable NO_SUCH_KEY is not set"):
        build_rollouts(settings(url, keyed))

    agent = "{environment: black_box, options: {agent: 'json:dumps', tasks: 'json:loads'}"
    judge = f"judge: {{url: '{url}', model: m, rubric: r}}}}"
    with pytest.raises(ConfigError, match="an external agent runs the episodes"):
        load_config(CONFIG, RlConfig, [f"tasks.sources={{a: {agent}, {judge}}}"])


def test_scores_are_metrics_of_training_and_evaluations() -> None:
    group, _ = play(says('{"score": 7}'))
    training, evaluation = StepMetrics(step=1), StepMetrics(step=1)
    add_rollout_metrics(training, [group])
    add_held_out_metrics(evaluation, [group])
    assert training.values()["reward/judge"] == pytest.approx(0.7)
    assert evaluation.values()["held_out/reward/judge"] == pytest.approx(0.7)
    assert training.values()["reward/judge_unscored"] == 0
