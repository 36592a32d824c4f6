"""Inputs of the trainer: tasks, rates, and detection of runs that do not learn."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_loop.config.errors import ConfigError
from rl_loop.config.run import RlConfig, check_reward_parts
from rl_loop.data.rollout_batch import RolloutBatch
from rl_loop.data.trajectory import Trajectory
from rl_loop.harmony.codec import ParsedMessage
from rl_loop.loop import RlLoop
from rl_loop.rollout.collector import held_out_requests
from rl_loop.rollout.group_stream import AdmittedGroup, GroupRequest, GroupStream
from rl_loop.rollout.pool import RolloutPool, WaitingGroup
from rl_loop.run_parts import build_tasks
from rl_loop.tracking.episode_reader import EpisodeReader
from rl_loop.tracking.metrics import MetricName
from rl_loop.tracking.run_directory import read_json_lines
from rl_loop.tracking.signal_watch import PATIENCE, SignalWatch
from rl_loop.trainer.checkpointer import RunState
from tests.support.in_process import LocalRollouts, local_loop
from tests.support.rl_loop.scripted_engine import ScriptedEngine
from tests.support.rl_loop.scripted_loop import FakeRollouts, answered, from_file, loop_over
from tests.support.rl_loop.small_config import NOTHING_ENDS, config

# ---- tasks


def collect_steps(loop: RlLoop, steps: range) -> list[RolloutBatch]:
    batches = []
    for step in steps:
        loop.collector.begin(step)
        batches.append(loop.collector.collect(step))
        loop.state.next_task = batches[-1].next_task
    return batches


def names(batches: list[RolloutBatch]) -> list[str]:
    return [group.task_id for batch in batches for group in batch.train]


DYNAMIC = [
    "rollout.tasks_per_step=10",
    "rollout.samples_per_task=2",
    "algorithm.dynamic_sampling_rounds=3",
    "training.steps=60",
]


def test_dynamic_sampling_repeats_no_task_within_an_epoch(
    tmp_path: Path,
) -> None:
    settings = config(tmp_path, *from_file(tmp_path, 300), *DYNAMIC)
    loop = loop_over(settings, FakeRollouts(lambda task: True), RunState())
    assert set(Counter(names(collect_steps(loop, range(30)))).values()) == {1}
    assert set(Counter(names(collect_steps(loop, range(30, 60)))).values()) == {1}


def test_every_task_with_signal_is_trained_on_within_an_epoch(tmp_path: Path) -> None:
    settings = config(tmp_path, *from_file(tmp_path, 70), *DYNAMIC)
    silent = {task.task_id for task in build_tasks(settings).train(0, 70)[::3]}
    rollouts = FakeRollouts(lambda task: task not in silent)
    loop = loop_over(settings, rollouts, RunState())
    trained: list[str] = []
    while (before := loop.state.next_task) < 70:
        step = len(trained) // 10
        (batch,) = collect_steps(loop, range(step, step + 1))
        assert len(batch.train) == 10
        assert batch.next_task - before == 10 + len(batch.replaced or [])
        trained += names([batch])
    with_signal = {task for task in rollouts.asked if task not in silent}
    of_first_epoch = trained[: len(with_signal)]
    assert sorted(of_first_epoch) == sorted(with_signal)


def test_resumed_run_continues_the_sequence_of_tasks(tmp_path: Path) -> None:
    settings = config(tmp_path, *from_file(tmp_path, 50), *DYNAMIC)

    def signal(task: str) -> bool:
        return ord(task[-1]) % 3 != 0

    whole = names(collect_steps(loop_over(settings, FakeRollouts(signal), RunState()), range(6)))
    first = loop_over(settings, FakeRollouts(signal), RunState())
    cut = names(collect_steps(first, range(2)))
    first.state.step = 2
    saved = RunState.from_checkpoint(json.loads(json.dumps(first.state.to_checkpoint())))
    assert (
        cut + names(collect_steps(loop_over(settings, FakeRollouts(signal), saved), range(2, 6)))
        == whole
    )


def test_step_takes_its_own_tasks_without_dynamic_sampling(tmp_path: Path) -> None:
    settings = config(tmp_path, "training.steps=3")
    loop = loop_over(settings, FakeRollouts(lambda task: False), RunState())
    wanted = [task.task_id for task in loop.tasks.train(0, 6)]
    assert names(collect_steps(loop, range(3))) == wanted
    resumed = loop_over(settings, FakeRollouts(lambda task: False), RunState(step=2, next_task=4))
    assert names(collect_steps(resumed, range(2, 3))) == wanted[4:]


def test_groups_of_equal_rewards_fill_an_incomplete_step(tmp_path: Path) -> None:
    settings = config(tmp_path, *from_file(tmp_path, 300), *DYNAMIC)
    tasks = [task.task_id for task in build_tasks(settings).train(0, 30)]
    rollouts = FakeRollouts(lambda task: task in tasks[25:29])
    (batch,) = collect_steps(loop_over(settings, rollouts, RunState()), range(1))
    assert names([batch]) == tasks[25:29] + tasks[:6]
    assert batch.replaced is not None
    assert [group.task_id for group in batch.replaced] == tasks[6:25] + tasks[29:]
    assert batch.next_task == 30


class RolloutsWithSignal(LocalRollouts):
    """Rollouts with real weight syncs and mock episodes of different rewards in every task."""

    def sync_weights(self, source: Any, version: int) -> None:
        super().sync_weights(source, version)
        self.version = version

    def begin(self, admitted: AdmittedGroup) -> None:
        admitted.end(answered(admitted.request, self.version, (-1.0, 1.0)))


def tasks_by_step(settings: RlConfig, resume: bool = False) -> list[list[str]]:
    """Train. Return the tasks of each training step of the run."""
    rollouts = RolloutsWithSignal(settings)
    with local_loop(settings, rollouts, resume) as loop:
        loop.train()
        loop.recorder.finish_writing()
        reader = EpisodeReader(loop.recorder.run.episodes)
        reader.refresh()
        records = reader.summary_table.select(["split", "step", "task_id"]).to_pylist()
    rollouts.close()
    of_step: dict[int, set[str]] = {}
    for record in records:
        if record["split"] == "train":
            of_step.setdefault(record["step"], set()).add(record["task_id"])
    return [sorted(tasks) for _, tasks in sorted(of_step.items())]


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_resumed_dynamic_sampling_skips_no_task(staleness: int, tmp_path: Path) -> None:
    options = [
        *from_file(tmp_path, 12),
        "algorithm.dynamic_sampling_rounds=3",
        f"algorithm.max_staleness={staleness}",
    ]
    options += ["optimizer.schedule=constant"]
    whole = tasks_by_step(config(tmp_path, *options, "name=whole", "training.steps=4"))
    assert set(Counter(task for step in whole for task in step).values()) == {1}
    tasks_by_step(config(tmp_path, *options, "name=cut", "training.steps=2"))
    assert (
        tasks_by_step(config(tmp_path, *options, "name=cut", "training.steps=4"), resume=True)
        == whole
    )


# ---- purification


def first_request(loop: RlLoop) -> GroupRequest:
    """Return the first training request of a loop."""
    return loop.collector._requests.for_group(0, 0)


def test_only_training_episodes_are_purified(tmp_path: Path) -> None:
    options = ["rollout.purification={}", "rollout.max_sampled_tokens_per_turn=200"]
    without_routes = ["rollout.routed_experts=false", "algorithm.routing_replay=none"]
    settings = config(tmp_path, *options, *without_routes)

    def outcome(requests: Callable[[RlLoop], list[GroupRequest]]) -> Trajectory:
        harmony = build_tasks(settings).codec

        def call(code: str) -> list[int]:
            thought = ParsedMessage("analysis", None, None, "x")
            return harmony.render_assistant(
                [thought, ParsedMessage("analysis", "python", "code", code)], "<|call|>"
            )

        answer = harmony.render_assistant(
            [ParsedMessage("final", None, None, r"\boxed{1}")], "<|return|>"
        )
        engine = ScriptedEngine([call("print(1"), call("print(1)"), answer])
        rollouts = LocalRollouts(settings, engine)  # type: ignore[arg-type]
        loop = loop_over(settings, rollouts, RunState())  # type: ignore[arg-type]
        ((episode,),) = (group.trajectories for group in rollouts.run(requests(loop)))
        rollouts.close()
        return episode

    held_out = outcome(lambda loop: loop.held_out[:1])
    assert (held_out.tool_errors, held_out.spliced) == (1, [])
    assert held_out.tool_calls == 2

    def one_training_episode(loop: RlLoop) -> list[GroupRequest]:
        request = first_request(loop)
        return [replace(request, seeds=request.seeds[:1])]

    training = outcome(one_training_episode)
    assert training.tool_errors == 0
    assert len(training.spliced) == 1


def test_pool_requests_purification_for_training_groups_only(tmp_path: Path) -> None:
    settings = config(tmp_path, "rollout.purification={}", "rollout.routed_experts=false")
    calls: list[dict[str, Any]] = []

    def run_group(*_: Any, **options: Any) -> int:
        calls.append(options)
        return len(calls)

    worker = SimpleNamespace(run_group=SimpleNamespace(remote=run_group))
    pool = object.__new__(RolloutPool)
    pool._workers = [worker]
    pool._config = settings
    pool._running = {}
    stream = GroupStream(lambda admitted: None)
    loop = loop_over(settings, FakeRollouts(lambda task: True), RunState())
    for request in (first_request(loop), held_out_requests(loop.tasks, 1.0)[0]):
        pool._submit(WaitingGroup(0, AdmittedGroup(0, request, stream)), 0)
    assert calls == [{"purify": True}, {"purify": False}]


# ---- learning rates


def test_policy_warmup_starts_after_the_critic_warmup(
    tmp_path: Path,
) -> None:
    options = [
        "algorithm=ppo",
        "algorithm.critic.warmup_steps=2",
    ]
    options += [
        "optimizer.lr=4e-4",
        "optimizer.warmup_steps=2",
        "optimizer.schedule=cosine",
        "training.steps=5",
    ]
    settings = config(tmp_path, *options)
    rates: dict[str, list[float]] = {"critic": [], "policy": []}
    with local_loop(settings) as loop:
        learn = loop.trainer.rl_step

        def rl_step(*arguments: Any) -> Any:
            updates = learn(*arguments)
            rates["critic"] += [update.learning_rate for update in updates.critic]
            rates["policy"] += [update.learning_rate for update in updates.policy]
            return updates

        loop.trainer.rl_step = rl_step  # type: ignore[method-assign]
        loop.train()
    assert rates["policy"] == pytest.approx([2e-4, 4e-4, 4e-4])
    assert rates["critic"] == pytest.approx([2e-6] * 5)


# ---- runs without signal


def test_run_without_signal_warns_once(tmp_path: Path) -> None:
    notes: list[str] = []
    with local_loop(config(tmp_path, *NOTHING_ENDS, f"training.steps={PATIENCE + 1}")) as loop:
        loop.recorder.progress.note = notes.append  # type: ignore[method-assign]
        loop.train()
    (note,) = notes
    assert note.startswith(
        f"step {PATIENCE}: warning: nothing to learn from in the last {PATIENCE} steps"
    )
    assert "every advantage is 0 (mean reward -1.000, 100% of the episodes end as length)" in note
    assert "gptoss sft" in note


def test_short_run_without_signal_warns_at_its_end(tmp_path: Path) -> None:
    """Otherwise 2 steps with loss 0 and gradient 0 look like a bug of a new loss."""
    notes: list[str] = []
    with local_loop(config(tmp_path, *NOTHING_ENDS, "training.steps=2")) as loop:
        loop.recorder.progress.note = notes.append  # type: ignore[method-assign]
        loop.train()
    (note,) = notes
    assert note.startswith("step 2: warning: nothing to learn from in the last 2 steps")
    assert "every advantage is 0" in note


def test_run_with_all_tokens_masked_warns(tmp_path: Path) -> None:
    notes: list[str] = []
    masked = [*NOTHING_ENDS, "rollout.truncated_episodes=mask", f"training.steps={PATIENCE}"]
    with local_loop(config(tmp_path, *masked)) as loop:
        loop.recorder.progress.note = notes.append  # type: ignore[method-assign]
        loop.train()
    (note,) = notes
    assert "no token is in the loss" in note


def test_watch_warns_after_consecutive_steps_without_gradient() -> None:
    watch, silent, lively = (
        SignalWatch(3),
        {MetricName.ZERO_ADVANTAGE_FRACTION: 1.0},
        {MetricName.ZERO_ADVANTAGE_FRACTION: 0.9},
    )
    assert [watch.observe(silent, [0.0]) for _ in range(2)] == [None, None]
    assert watch.observe(lively, [0.0, 0.1]) is None
    assert [watch.observe(lively, [0.0, 0.0]) for _ in range(2)] == [None, None]
    warning = watch.observe(lively, [0.0, 0.0])
    assert (
        warning is not None
        and "the gradient is exactly 0, although rewards differ within some tasks" in warning
    )
    assert [watch.observe(silent, [0.0]) for _ in range(9)] == [None] * 9


def test_watch_reports_a_policy_that_solves_everything() -> None:
    values = {
        MetricName.ZERO_ADVANTAGE_FRACTION: 1.0,
        MetricName.REWARD: 1.0,
        MetricName.ACCURACY: 1.0,
        "finish/stop": 1.0,
    }
    warning = SignalWatch(1).observe(values, [0.0])
    assert warning is not None and "solves all tasks" in warning


# ---- reward parts


def test_reward_weight_of_an_unknown_part_is_rejected(tmp_path: Path) -> None:
    def check(weights: str) -> None:
        settings = config(
            tmp_path, "algorithm=gdpo", f"algorithm.advantage.reward_weights={weights}"
        )
        check_reward_parts(settings, build_tasks(settings).reward_parts())

    check("{correct: 1.0, score: 1.0, format_error: -0.2}")
    with pytest.raises(
        ConfigError, match=r"has the reward part corect\. Known parts: correct, format_error, score"
    ):
        check("{corect: 1.0}")


def test_format_errors_do_not_end_a_run_with_weighted_score(tmp_path: Path) -> None:
    weights = "algorithm.advantage.reward_weights={score: 1.0, format_error: -0.2}"
    with local_loop(config(tmp_path, "algorithm=gdpo", weights, "training.steps=8")) as loop:
        loop.train()
        records = read_json_lines(loop.recorder.run.metrics)
    steps = [record for record in records if "reward" in record]
    assert len(steps) == 8
    assert any(step["finish/format_error"] > 0 for step in steps), (
        "an episode must have been illegal"
    )
