"""Time of the check of engines against the trainer.

It runs before training, and concurrently with episodes only if the engine allows it.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_gptoss.samples import TrainingSamples
from rl_loop.rollout.group_stream import AdmittedGroup, GroupStream
from rl_loop.tracking.recorder import StepRecord
from rl_loop.trainer.checkpointer import RunState
from rl_loop.weight_sync.canary import CanaryError
from tests.support.rl_loop.scripted_loop import answered, loop_over
from tests.support.rl_loop.small_config import config

WAIT = 60.0
"""Time limit in seconds for events that come at once."""


class TrainingBegan(Exception):  # noqa: N818 - control flow, not an error
    """Raised when the loop continues from the rollouts to the update."""


class Trainer:
    """A trainer with equal scores for all tokens and without updates."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def score(self, samples: TrainingSamples, temperature: float) -> np.ndarray:
        return np.full(samples.tokens, -1.0, np.float32)

    def enter_phase(self, phase: str) -> None:
        self.events.append("training begins")
        raise TrainingBegan


class Rollouts:
    """Groups that end, fail or hang, and engines that differ from the trainer by ``gap``."""

    def __init__(self, *, beside: bool, gap: float = 0.0, groups: str = "end") -> None:
        self.scores_during_rollouts = beside
        self.gap = gap
        self.groups = groups
        self.events: list[str] = []
        self.first_group = threading.Event()
        self.scores_after_first_group = False

    def sync_weights(self, source: Any, version: int) -> None:
        self.events.append("sync")

    def prepare_sync(self, source: Any) -> None: ...

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        if self.scores_after_first_group:
            assert self.first_group.wait(WAIT), "no episode begins before the canary is compared"
        self.events.append("canary")
        return [[-1.0 - self.gap] * (len(token_ids) - 1)]

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        return []

    def compare_weights(self) -> None: ...

    def pause(self) -> None: ...

    def updating_weights(self, version: int) -> AbstractContextManager[None]:
        return nullcontext()

    def stream(self) -> GroupStream:
        return GroupStream(self.begin)

    def begin(self, admitted: AdmittedGroup) -> None:
        self.events.append("group")
        self.first_group.set()
        if self.groups == "end":
            admitted.end(answered(admitted.request, 0, (-1.0, 1.0)))
        elif self.groups == "fail":
            admitted.fail(RuntimeError("the model's logits are not finite"))

    def run(self, requests: Any) -> list[Any]:
        self.events.append("evaluation")
        return []


class Recorder:
    """A recorder that notes whether an evaluation was recorded."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.progress: Any = self

    def begin_step(self, step: int) -> StepRecord:
        return StepRecord(step, self.progress)

    def phase(self, name: str) -> None: ...

    def episodes(self, ended: int, wanted: int) -> None: ...

    def record_evaluation(self, record: StepRecord, groups: Any) -> None:
        self.events.append("recorded")


def loop_with(rollouts: Rollouts, directory: Path) -> Any:
    settings = config(directory, "evaluate_every=1000", "rollout.tasks_per_step=2")
    loop: Any = loop_over(settings, rollouts, RunState())  # type: ignore[arg-type]
    loop.trainer = Trainer(rollouts.events)
    loop.recorder = Recorder(rollouts.events)
    return loop


def run_step(loop: Any) -> None:
    """Run the step until its update."""
    try:
        loop.run_step(0)
    except TrainingBegan:
        return


def test_canary_runs_concurrently_with_episodes_if_allowed(
    tmp_path: Path,
) -> None:
    rollouts = Rollouts(beside=True)
    rollouts.scores_after_first_group = True
    run_step(loop_with(rollouts, tmp_path))
    assert rollouts.events[0] == "sync"
    assert rollouts.events.index("group") < rollouts.events.index("canary")
    assert rollouts.events[-1] == "training begins"


def test_canary_runs_before_the_first_episode_otherwise(tmp_path: Path) -> None:
    rollouts = Rollouts(beside=False)
    run_step(loop_with(rollouts, tmp_path))
    assert rollouts.events[:3] == ["sync", "canary", "group"]
    assert rollouts.events[-1] == "training begins"


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("groups", ["end", "fail", "hang"])
def test_canary_mismatch_ends_the_step_before_its_update(
    beside: bool, groups: str, tmp_path: Path
) -> None:
    """The step ends even if episodes fail, and without waiting for running episodes."""
    rollouts = Rollouts(beside=beside, gap=0.5, groups=groups)
    with pytest.raises(CanaryError, match="after syncing weights 0, rollout worker 0"):
        run_step(loop_with(rollouts, tmp_path))
    assert "training begins" not in rollouts.events


def test_failing_episodes_raise_their_own_error_if_weights_agree(tmp_path: Path) -> None:
    rollouts = Rollouts(beside=True, groups="fail")
    with pytest.raises(RuntimeError, match="logits are not finite"):
        run_step(loop_with(rollouts, tmp_path))


def test_evaluation_of_mismatched_weights_is_not_recorded(tmp_path: Path) -> None:
    rollouts = Rollouts(beside=True, gap=0.5)
    with pytest.raises(CanaryError):
        loop_with(rollouts, tmp_path).evaluate()
    assert "recorded" not in rollouts.events

    rollouts = Rollouts(beside=True)
    metrics = loop_with(rollouts, tmp_path).evaluate()
    assert rollouts.events[-1] == "recorded"
    assert "mismatch/canary_gap" in str(vars(metrics))
