"""Resume of a run that an infrastructure outage has ended."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.data.rollout_batch import RlUpdates
from rl_loop.data.trajectory import InvalidReason, Trajectory, TrajectoryGroup, WeightVersionSpan
from rl_loop.infrastructure import InfrastructureOutageError
from rl_loop.loop import RlLoop
from rl_loop.rollout.group_store import GroupStore
from rl_loop.rollout.group_stream import AdmittedGroup, GroupStream
from rl_loop.tracking.metrics import StepMetrics
from rl_loop.tracking.run_directory import RunDirectory, read_json_lines
from rl_loop.trainer.checkpointer import Checkpointer, RunState
from tests.support.rl_loop.lifecycle import broken_world
from tests.support.rl_loop.lifecycle.driver import Driver
from tests.support.rl_loop.tiny_runs import CONFIGS, RL

STEPS = 6
SAVED = 3


class Trainer:
    """A trainer without updates that keeps its last checkpoint."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] | None = None

    def score(self, samples: Any, temperature: float | None = None) -> np.ndarray:
        return np.zeros(samples.tokens, np.float32)

    def rl_step(self, samples: Any, step: int) -> RlUpdates:
        return RlUpdates()

    def enter_phase(self, phase: str) -> None: ...

    def save(self, step: int, state: dict[str, Any], block: bool) -> None:
        self.saved = dict(state)


class Rollouts:
    """Rollouts that end every group at once. Groups with a true ``is_broken`` fail."""

    scores_during_rollouts = False

    def __init__(self, is_broken: Any) -> None:
        self._is_broken = is_broken
        self._version = 0

    def sync_weights(self, source: Any, version: int) -> None:
        self._version = version

    def prepare_sync(self, source: Any) -> None: ...

    def pause(self) -> None: ...

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        return [[0.0] * (len(token_ids) - 1)]

    def updating_weights(self, version: int) -> Any:
        return nullcontext()

    def stream(self) -> GroupStream:
        return GroupStream(self._end)

    def _end(self, admitted: AdmittedGroup) -> None:
        task, count = admitted.request.task.task_id, len(admitted.request.seeds)
        if self._is_broken(self._version, admitted.number):
            failed = [episode(task, self._version, failed=True) for _ in range(count)]
            admitted.end(TrajectoryGroup(task, [], failed))
        else:
            group = [episode(task, self._version) for _ in range(count)]
            admitted.end(TrajectoryGroup(task, group))


def episode(task: str, version: int, failed: bool = False) -> Trajectory:
    mask = np.arange(40) > 20
    log_probs = np.where(mask, np.float32(-1), np.float32(0))
    ids = np.arange(40, dtype=np.int32)
    if failed:
        reason = InvalidReason("sandbox", "the sandbox is gone")
        return Trajectory(
            task,
            token_ids=ids,
            loss_mask=mask,
            rollout_log_probs=log_probs,
            reward=math.nan,
            invalid=reason,
        )
    return Trajectory(
        task,
        token_ids=ids,
        loss_mask=mask,
        rollout_log_probs=log_probs,
        weight_versions=[WeightVersionSpan(21, 40, version)],
        reward=1.0,
    )


class Tasks:
    unusable: ClassVar[list[str]] = []
    selects_tasks = False

    def select(self, position: int, count: int, step: int) -> list[int]:
        return list(range(position, position + count))

    def add_groups(self, step: int, groups: Any) -> None: ...

    def train(self, position: int, count: int) -> list[Any]:
        return [SimpleNamespace(task_id=f"t{position + i}") for i in range(count)]

    def held_out(self) -> list[Any]:
        return [SimpleNamespace(task_id="held-out")]

    def canary(self) -> list[int]:
        return list(range(10))


class Recorder:
    progress = SimpleNamespace(episodes=lambda *_: None, phase=lambda *_: None)

    def begin_step(self, step: int) -> Any:
        return SimpleNamespace(metrics=StepMetrics(step), time_phase=lambda name: nullcontext())

    def record_rl_step(self, *_: Any) -> None: ...


def attempt(trainer: Trainer, directory: Path, is_broken: Any, *overrides: str) -> int:
    """Run the loop from the trainer's checkpoint to the end."""
    options = ["initial_weights=null", "evaluate_every=1000", f"training.steps={STEPS}", *overrides]
    config = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, options)
    loop = RlLoop(
        config,
        trainer=trainer,  # type: ignore[arg-type]
        rollouts=Rollouts(is_broken),  # type: ignore[arg-type]
        tasks=Tasks(),
        recorder=Recorder(),  # type: ignore[arg-type]
        checkpointer=Checkpointer(
            trainer, RunState.from_checkpoint(trainer.saved), config.training
        ),
        group_store=GroupStore(directory, 2, "settings"),
    )
    return loop.train()


@pytest.mark.parametrize("staleness", [0, 2])
def test_outage_does_not_end_later_attempts(staleness: int, tmp_path: Path) -> None:
    trainer = Trainer()
    asynchronous = f"algorithm.max_staleness={staleness}"
    with pytest.raises(InfrastructureOutageError):
        attempt(trainer, tmp_path, lambda version, number: version >= SAVED, asynchronous)
    # Episodes of the next steps ended before the outage.
    assert trainer.saved is not None and trainer.saved["step"] == SAVED + staleness
    assert attempt(trainer, tmp_path, lambda version, number: False, asynchronous) == STEPS


def test_outage_keeps_the_groups_without_failures(tmp_path: Path) -> None:
    trainer = Trainer()

    def second_half(version: int, number: int) -> bool:
        return version >= SAVED and number % 12 >= 4

    with pytest.raises(InfrastructureOutageError):
        attempt(trainer, tmp_path, second_half)
    begun: list[int] = []

    def all_is_well(version: int, number: int) -> bool:
        begun.append(number)
        return False

    assert attempt(trainer, tmp_path, all_is_well) == STEPS
    assert set(begun) == set(range(SAVED * 12 + 4, STEPS * 12))


@pytest.mark.slow
def test_run_continues_when_an_outage_is_over(tmp_path: Path) -> None:
    """The run and its resume are real processes with Ray, workers and an environment."""
    source = "{environment: 'tests.support.rl_loop.lifecycle.broken_world:BrokenWorld', options: {instructions: null}}"
    settings = [
        *RL,
        f"output_dir={tmp_path}",
        "name=outage",
        f"tasks.sources={{retool: {source}}}",
        "training.steps=4",
        "training.checkpoint_every=1",
    ]
    run = RunDirectory(tmp_path / "outage")
    os.environ[broken_world.METRICS] = str(run.metrics)
    try:
        first = Driver(["-m", "launch"], settings)
        assert first.wait() != 0
        said = first.said
        assert "the world is away" in said, said
    finally:
        del os.environ[broken_world.METRICS]
    assert (run.checkpoints / "latest").read_text() == "step_000002"

    resumed = Driver(["-m", "launch"], [*settings, "--resume"])
    assert resumed.wait() == 0, resumed.said
    steps = [record["step"] for record in read_json_lines(run.metrics) if "reward" in record]
    assert steps == [1, 2, 3, 4]
