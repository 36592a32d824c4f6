"""Invariants of tokens and steps at any staleness, in one process with the real trainer."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_gptoss.samples import TrainingSamples
from rl_loop.config.run import RlConfig
from rl_loop.data.credit import assign_advantages
from rl_loop.data.samples import to_samples
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.loop import RlLoop
from rl_loop.rollout.collector import TrainingRequests
from rl_loop.rollout.group_stream import RolloutsAbandoned
from rl_loop.run_parts import build_tasks
from rl_loop.tracking.run_directory import read_training_steps
from tests.support.in_process import LocalRollouts, local_loop, local_trainer
from tests.support.rl_loop.small_config import config as small_config
from tests.support.rl_loop.timeless_engine import TimelessEngine
from tests.support.waiting import wait_until

STEPS = 5
TASKS = 3
"""Tasks per step."""


def config(directory: Path, *overrides: str) -> RlConfig:
    settings = [
        f"training.steps={STEPS}",
        f"rollout.tasks_per_step={TASKS}",
        "rollout.samples_per_task=4",
        "rollout.routed_experts=false",
        "optimizer.lr=1e-2",
        "evaluate_every=2",
        # Scores of the timeless engine differ from those of the trainer.
        "canary_tolerance=1000",
    ]
    return small_config(directory, *settings, *overrides)


def uneven_seconds(episode: str, version: int) -> float:
    """Return the duration of a request of an episode.

    Of the steps after the first, every fourth episode that starts with the initial weights lasts
    until the next weights interrupt it, however slow the machine is.
    """
    task, sample = episode.split("/")
    split, number = task.split("-")[-2:]
    if split == "train" and int(number) >= TASKS and int(sample) % 4 == 0 and version == 0:
        return 600.0
    return 0.05 * random.Random(episode).random()


class Recorded:
    """A run whose tokens depend only on the episode. Records the data of every training step."""

    def __init__(
        self, settings: RlConfig, seconds_of: Callable[[str, int], float] = lambda *_: 0.0
    ) -> None:
        self.settings = settings
        stop_ids = tuple(build_tasks(settings).codec.stop_token_ids)
        self.engine = TimelessEngine(stop_ids, seconds_of)
        self.batches: list[list[TrajectoryGroup]] = []
        self.samples: list[TrainingSamples] = []
        self.weights: dict[str, torch.Tensor] = {}

    def train(
        self, *, resume: bool = False, prepare: Callable[[RlLoop], None] = lambda loop: None
    ) -> int:
        """Run the remaining steps after ``prepare`` has changed the loop. Return the step count."""
        rollouts = LocalRollouts(self.settings, self.engine)  # type: ignore[arg-type]
        try:
            with local_loop(self.settings, rollouts, resume) as loop:
                collect, learn = loop.collect_episodes, loop.trainer.rl_step
                save = loop.checkpointer._save
                collected: list[list[TrajectoryGroup]] = []

                def save_and_wait(*, block: bool) -> None:
                    save(block=True)

                def noted_collect(step: int, record: Any) -> Any:
                    batch = collect(step, record)
                    collected.append(batch.train)
                    return batch

                def rl_step(samples: TrainingSamples, step: int) -> Any:
                    updates = learn(samples, step)
                    self.batches.append(collected[-1])
                    self.samples.append(samples)
                    return updates

                loop.checkpointer._save = save_and_wait  # type: ignore[method-assign]
                loop.collect_episodes = noted_collect  # type: ignore[method-assign]
                loop.trainer.rl_step = rl_step  # type: ignore[method-assign]
                prepare(loop)
                done = loop.train()
                self.weights = {
                    name: tensor.clone() for name, tensor in loop.trainer.weights().items()
                }
        finally:
            rollouts.close()
        return done

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_training_steps(self.settings.directory / "metrics.jsonl")

    @property
    def episodes(self) -> list[Trajectory]:
        return [t for batch in self.batches for group in batch for t in group.trajectories]

    def task_ids(self) -> list[list[str]]:
        return [[group.task_id for group in batch] for batch in self.batches]


def tokens(episode: Trajectory) -> tuple[int, ...]:
    return tuple(episode.token_ids.tolist())


# ---- staleness 0 and 1: the recorded episodes

DIGESTS = [
    "98e3e5778f98decb",
    "31be608c1295b531",
    "97a88192836f3c41",
    "4ab316fd3313d8eb",
    "2fc6bae40fe35cb5",
]
"""Digests of the episodes of each step, recorded with the loop of commit 8ae9bdd."""


def digest(samples: TrainingSamples) -> str:
    content = hashlib.sha256()
    for column in (
        samples.token_ids,
        samples.loss_mask,
        samples.rollout_log_probs,
        samples.offsets,
    ):
        content.update(np.ascontiguousarray(column).tobytes())
    return content.hexdigest()[:16]


@pytest.mark.parametrize("staleness", [0, 1])
def test_staleness_0_and_1_train_on_the_recorded_episodes(
    staleness: int, runs: dict[int, Recorded]
) -> None:
    run = runs[staleness]
    assert [digest(samples) for samples in run.samples] == DIGESTS


def sequential_weights(settings: RlConfig) -> dict[str, torch.Tensor]:
    """Train in sequence on all episodes of each step. Return the final weights."""
    tasks = build_tasks(settings)
    trainer = local_trainer(settings)
    rollouts = LocalRollouts(settings, TimelessEngine(tuple(tasks.codec.stop_token_ids)))  # type: ignore[arg-type]
    requests = TrainingRequests(tasks, settings.rollout, settings.seed)
    algorithm, longest = settings.algorithm, settings.rollout.max_response_tokens
    for step in range(STEPS):
        first = step * TASKS
        groups = rollouts.run([requests.for_group(n, n) for n in range(first, first + TASKS)])
        samples = to_samples(groups, algorithm, version=0)
        trainer.rl_step(assign_advantages(samples, groups, algorithm, longest), step)
    weights = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    rollouts.close()
    trainer.close()
    return weights


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_weights_equal_those_of_a_sequential_loop_bit_for_bit(
    staleness: int, runs: dict[int, Recorded]
) -> None:
    """The tokens do not depend on the weights, so staleness must not change the updates."""
    run = runs[staleness]
    expected = sequential_weights(run.settings)
    assert set(run.weights) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(run.weights[name], tensor), name


# ---- invariants at any staleness

STALENESS = [0, 1, 2, 4]


def recorded_run(tmp_path_factory: pytest.TempPathFactory, staleness: int) -> Recorded:
    options = [f"algorithm.max_staleness={staleness}"]
    run = Recorded(config(tmp_path_factory.mktemp("run"), *options), uneven_seconds)
    assert run.train() == STEPS
    return run


@pytest.fixture(scope="module")
def staleness_2(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded_run(tmp_path_factory, 2)


@pytest.fixture(scope="module")
def runs(staleness_2: Recorded, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Recorded]:
    recorded = {2: staleness_2}
    for staleness in STALENESS:
        if staleness not in recorded:
            recorded[staleness] = recorded_run(tmp_path_factory, staleness)
    return recorded


@pytest.mark.parametrize("staleness", STALENESS)
def test_versions_rise_and_stay_within_the_staleness_limit(
    runs: dict[int, Recorded], staleness: int
) -> None:
    for step, batch in enumerate(runs[staleness].batches):
        for group in batch:
            for episode in group.trajectories:
                versions = [span.version for span in episode.weight_versions]
                assert versions == sorted(versions)
                assert step - staleness <= versions[0] <= versions[-1] <= step


@pytest.mark.parametrize("staleness", STALENESS)
def test_spans_of_versions_partition_the_sampled_tokens(
    runs: dict[int, Recorded], staleness: int
) -> None:
    for episode in runs[staleness].episodes:
        covered = np.zeros(len(episode), dtype=np.int32)
        for span in episode.weight_versions:
            covered[span.start : span.end] += 1
        assert covered.tolist() == episode.loss_mask.astype(np.int32).tolist()


@pytest.mark.parametrize("staleness", STALENESS)
def test_every_group_is_trained_on_once_with_sampled_episodes(
    runs: dict[int, Recorded], staleness: int
) -> None:
    run, turns = runs[staleness], runs[0]
    assert {len(batch) for batch in run.batches} == {TASKS}
    assert {len(group.trajectories) for batch in run.batches for group in batch} == {4}
    # An interrupted episode continues from its exact prefix, so all episodes have the same tokens
    # as without interruptions.
    assert Counter(map(tokens, run.episodes)) == Counter(map(tokens, turns.episodes))
    assert run.task_ids() == turns.task_ids()


def test_interrupted_episode_has_a_span_per_weight_version(
    runs: dict[int, Recorded],
) -> None:
    versions = [{span.version for span in episode.weight_versions} for episode in runs[4].episodes]
    assert max(map(len, versions)) > 1


def test_held_out_episodes_stay_within_one_version(tmp_path: Path) -> None:
    settings = config(tmp_path, "algorithm.max_staleness=3", "tasks.held_out_tasks=4")
    run = Recorded(settings, uneven_seconds)
    seen: list[set[int]] = []

    def watch(loop: RlLoop) -> None:
        collect = loop.collect_episodes

        def noted(step: int, record: Any) -> Any:
            batch = collect(step, record)
            spans = [s for g in batch.held_out for t in g.trajectories for s in t.weight_versions]
            if batch.held_out:
                seen.append({span.version for span in spans} - {step})
            return batch

        loop.collect_episodes = noted  # type: ignore[method-assign]

    run.train(prepare=watch)
    assert seen == [set()] * 3


def test_slow_episode_delays_only_its_own_step(tmp_path: Path) -> None:
    """An episode of step 0 takes long. Groups of later steps end before it."""
    settings = config(tmp_path, "algorithm.max_staleness=2")
    (task,) = (task.task_id for task in build_tasks(settings).train(0, 1))
    run = Recorded(settings, lambda episode, _: 3.0 if episode == f"{task}/0" else 0.0)
    ended: list[int] = []

    def watch(loop: RlLoop) -> None:
        collect = loop.collect_episodes

        def noted(step: int, record: Any) -> Any:
            batch = collect(step, record)
            assert batch.async_groups is not None
            ended.append(batch.async_groups.ended)
            return batch

        loop.collect_episodes = noted  # type: ignore[method-assign]

    assert run.train(prepare=watch) == STEPS
    assert task in run.task_ids()[0]
    assert ended[0] >= TASKS


def test_metrics_report_staleness_of_rollouts(runs: dict[int, Recorded]) -> None:
    for step in runs[0].metrics:
        assert not {name for name in step if name.startswith(("fresh/", "stale/"))}

    steps = runs[2].metrics
    assert [step["rollout/async_groups"] for step in steps] == [6, 6, 6, 3, 0]
    assert [step["rollout/staleness_max"] for step in steps] == [0, 1, 2, 2, 2]
    for step in steps:
        assert 0 <= step["rollout/staleness_mean"] <= step["rollout/staleness_max"]
        assert 1 <= step["rollout/versions_per_episode"] <= 3
    assert steps[0]["rollout/recomputed_tokens"] == 0
    assert max(step["rollout/recomputed_tokens"] for step in steps) > 0
    assert "stale/kl_k3" not in steps[0]
    assert all(0 < step["stale/effective_sample_size"] <= 1 for step in steps[1:])


# ---- failures


def test_error_in_a_group_ends_the_run(tmp_path: Path) -> None:
    run = Recorded(config(tmp_path, "algorithm.max_staleness=2"))

    def break_a_group(loop: RlLoop) -> None:
        rollouts: Any = loop.rollouts
        run_group = rollouts.worker.run_group

        async def broken(task: Any, *arguments: Any, **options: Any) -> Any:
            if task.task_id.endswith("-7"):
                raise AssertionError("a bug")
            return await run_group(task, *arguments, **options)

        rollouts.worker.run_group = broken

    with pytest.raises(AssertionError, match="a bug"):
        run.train(prepare=break_a_group)


# ---- resuming

MOMENTS = [
    "synced",
    "collecting",
    "group ended",
    "collected",
    "updated",
    "groups saved",
    "saved",
]
"""Moments of a step, in order."""


class Killed(BaseException):
    """Ends a run like a kill, without cleanup or save."""


def killed_at(moment: str, step: int) -> Callable[[RlLoop], None]:
    """Return a function that makes a loop raise ``Killed`` at a moment of a step."""

    def prepare(loop: RlLoop) -> None:
        def kill_in_step() -> None:
            if loop.state.step == step:
                raise Killed

        def kill_when_saved(done: int) -> None:
            if done == step + 1:
                raise Killed

        def kill_if_any_ended(ended: int, wanted: int) -> None:
            if ended > 0:
                kill_in_step()

        checkpointer = loop.checkpointer
        if moment == "synced":
            loop.sync_engines = followed_by(
                loop.sync_engines, lambda version, record: kill_in_step()
            )  # type: ignore[method-assign]
        elif moment == "collecting":
            begin = followed_by(loop.collector.begin, lambda version, held_out: kill_in_step())
            loop.collector.begin = begin  # type: ignore[method-assign]
        elif moment == "group ended":
            loop.collector._on_ended = kill_if_any_ended
        elif moment == "collected":
            loop.collect_episodes = followed_by(
                loop.collect_episodes, lambda at, record: kill_in_step()
            )  # type: ignore[method-assign]
        elif moment == "updated":
            loop.update_policy = followed_by(
                loop.update_policy, lambda at, samples, record: kill_in_step()
            )  # type: ignore[method-assign]
        elif moment == "groups saved":
            checkpointer.save_external_state = followed_by(
                checkpointer.save_external_state, kill_when_saved
            )
        else:
            save = followed_by(checkpointer._save, lambda block: kill_when_saved(loop.state.step))
            checkpointer._save = save  # type: ignore[method-assign]

    return prepare


def followed_by(call: Callable[..., Any], then: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that runs ``call``, and then ``then`` with the same arguments."""

    def both(*arguments: Any, **named: Any) -> Any:
        result = call(*arguments, **named)
        then(*arguments, **named)
        return result

    return both


def limit_open_steps(loop: RlLoop) -> None:
    """Make a loop fail if more steps are in flight than in an uninterrupted run."""
    most = 1 + loop.algorithm.max_staleness

    def check(version: int, held_out: Any) -> None:
        assert len(loop.collector._open) <= most

    loop.collector.begin = followed_by(loop.collector.begin, check)  # type: ignore[method-assign]


def drop_unsaved_steps(run: Recorded) -> None:
    """Drop recorded steps after the last checkpoint, because the run repeats them."""
    latest = run.settings.directory / "checkpoints/latest"
    saved = int(latest.read_text().rpartition("_")[2]) if latest.exists() else 0
    del run.batches[saved:]
    del run.samples[saved:]


def check_trained_once_within_staleness(run: Recorded, whole: Recorded) -> None:
    """Compare a run with ``whole``, an uninterrupted run."""
    assert Counter(map(tokens, run.episodes)) == Counter(map(tokens, whole.episodes))
    assert len({tokens(episode) for episode in run.episodes}) == STEPS * TASKS * 4
    assert run.task_ids() == whole.task_ids()
    for step, batch in enumerate(run.batches):
        for group in batch:
            for episode in group.trajectories:
                versions = [span.version for span in episode.weight_versions]
                assert versions == sorted(versions)
                assert step - 2 <= versions[0] <= versions[-1] <= step


# Moments without a death in the next test. Tests of the other moments are slow.
FEW_MOMENTS = ("collecting", "groups saved")
DEATHS = [
    pytest.param(moment, marks=() if moment in FEW_MOMENTS else pytest.mark.slow)
    for moment in MOMENTS
]


@pytest.mark.parametrize("moment", DEATHS)
def test_killed_run_trains_on_every_group_once_after_its_resume(
    staleness_2: Recorded, moment: str, tmp_path: Path
) -> None:
    options = ["algorithm.max_staleness=2"]
    settings = config(tmp_path, *options, "training.checkpoint_every=1")
    run = Recorded(settings, uneven_seconds)
    with pytest.raises(Killed):
        run.train(prepare=killed_at(moment, 3))

    drop_unsaved_steps(run)
    assert len(run.batches) == (4 if moment == "saved" else 3)
    assert run.train(resume=True, prepare=limit_open_steps) == STEPS
    check_trained_once_within_staleness(run, staleness_2)


def test_run_killed_repeatedly_trains_on_every_group_once(
    staleness_2: Recorded, tmp_path: Path
) -> None:
    """Each attempt is killed at another moment, the first one before any checkpoint."""
    options = ["algorithm.max_staleness=2"]
    settings = config(tmp_path, *options, "training.checkpoint_every=1")
    run = Recorded(settings, uneven_seconds)
    deaths = [("updated", 0), ("group ended", 2), ("collected", 2), ("saved", 3)]
    for attempt, (moment, step) in enumerate(deaths):

        def prepare(loop: RlLoop, moment: str = moment, step: int = step) -> None:
            limit_open_steps(loop)
            killed_at(moment, step)(loop)

        with pytest.raises(Killed):
            run.train(resume=attempt > 0, prepare=prepare)
        drop_unsaved_steps(run)

    assert run.train(resume=True, prepare=limit_open_steps) == STEPS
    check_trained_once_within_staleness(run, staleness_2)


def test_finished_episodes_are_restored_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    settings = config(tmp_path, "algorithm.max_staleness=2", "training.checkpoint_every=1")
    run = Recorded(settings)

    def wait_for_all(loop: RlLoop) -> None:
        """Let every group end before the checkpoint, and stop there."""
        update = loop.update_policy
        rollouts: Any = loop.rollouts

        def patient_update(step: int, samples: Any, record: Any) -> Any:
            for running in list(rollouts._running):
                running.result()
            wait_until(lambda: all(groups.is_complete for groups in loop.collector._open.values()))
            return update(step, samples, record)

        loop.update_policy = patient_update  # type: ignore[method-assign]
        training = loop.config.training.model_copy(update={"steps": 2})
        loop.config = loop.config.model_copy(update={"training": training})

    assert run.train(prepare=wait_for_all) == 2
    begun = {episode for episode, _ in run.engine.begun}
    run.engine.begun.clear()
    assert run.train(resume=True) == STEPS
    again = {episode for episode, _ in run.engine.begun} & begun
    # Held-out episodes are the same in every evaluation, so they repeat.
    assert {episode for episode in again if int(episode.rpartition("/")[2]) >= 1000} == set()

    # Two steps were complete. Their tokens have the weight versions from before the interruption.
    for step, oldest in ((2, 0), (3, 1), (4, 2)):
        versions = {e.weight_versions[0].version for g in run.batches[step] for e in g.trajectories}
        assert versions == {oldest}


def test_abandoned_rollouts_save_their_finished_groups(tmp_path: Path) -> None:
    settings = config(tmp_path, "algorithm.max_staleness=2")
    run = Recorded(settings, uneven_seconds)

    def abandon_in_step_two(loop: RlLoop) -> None:
        begin = loop.collector.begin

        def abandoned(version: int, held_out: Any = ()) -> None:
            begin(version, held_out)
            if version == 2:
                raise RolloutsAbandoned

        loop.collector.begin = abandoned  # type: ignore[method-assign]

    assert run.train(prepare=abandon_in_step_two) == 2
    assert run.train(resume=True) == STEPS
    assert len(run.batches) == STEPS, "a finished step was taken again"
    assert len({tokens(episode) for episode in run.episodes}) == STEPS * TASKS * 4


def test_timeless_engine_gives_equal_tokens_when_interrupted() -> None:
    """The tests above rely on this property."""
    from rl_loop.engines.protocol import GenerateRequest, SamplingParams

    async def sample(interruptions: int) -> list[int]:
        engine = TimelessEngine((7,), seconds_of=lambda *_: 0.05)
        prompt, done = [1, 2, 3], list[int]()
        while True:
            name = f"t/1/0/{len(done)}"
            request = GenerateRequest(name, prompt + done, SamplingParams(64 - len(done)))
            running = asyncio.ensure_future(engine.generate(request))
            if interruptions > 0:
                interruptions -= 1
                await asyncio.sleep(0.02)
                await engine.sync_weights([], interruptions)
            result = await running
            done += result.output_ids
            if result.finish_reason != "abort":
                return done

    whole = asyncio.run(sample(0))
    assert asyncio.run(sample(3)) == whole
