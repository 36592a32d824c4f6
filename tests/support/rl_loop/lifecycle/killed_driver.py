"""``gptoss`` that is killed at a chosen moment: ``python killed_driver.py MOMENT:STEP rl CONFIG
...``.

The signal is SIGKILL, so no code of the driver runs afterwards. The patches only detect the moment.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from threading import Timer
from typing import Any

import ray

from launch.cli import app
from rl_loop.loop import RlLoop
from rl_loop.rollout.collector import RolloutCollector
from rl_loop.rollout.worker_actors import WorkerActors
from rl_loop.trainer.checkpointer import Checkpointer


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def while_rollouts_are_under_way(step: int) -> None:
    """Kill shortly after the groups of a step have started, while the loop waits for them."""
    collect = RolloutCollector.collect

    def killed_collect(self: RolloutCollector, at: int) -> Any:
        if at == step:
            Timer(0.05, kill).start()
        return collect(self, at)

    RolloutCollector.collect = killed_collect  # type: ignore[method-assign]


def in_a_sync(step: int) -> None:
    """Kill when the first worker has the new weights and the others do not."""
    call_all = WorkerActors.call_all

    def killed_call(self: WorkerActors, method: str, *arguments: Any) -> list[Any]:
        if method == "load_weights" and arguments[-1] == step:
            ray.get(self[0].load_weights.remote(*arguments))
            kill()
        return call_all(self, method, *arguments)

    WorkerActors.call_all = killed_call  # type: ignore[method-assign]


def between_update_and_checkpoint(step: int) -> None:
    """Kill after the update and its metrics, before the step counts as completed."""
    end_step = Checkpointer.end_step

    def killed_end(self: Checkpointer, **options: Any) -> bool:
        if self.state.step == step:
            kill()
        return end_step(self, **options)

    Checkpointer.end_step = killed_end  # type: ignore[method-assign]


def while_a_checkpoint_is_written(step: int) -> None:
    """Kill while ranks save a checkpoint and the asynchronous episodes are on the disk."""
    save = RlLoop.save_finished_groups

    def killed_save(self: RlLoop, steps: int) -> None:
        save(self, steps)
        if steps > step:
            Timer(0.02, kill).start()

    RlLoop.save_finished_groups = killed_save  # type: ignore[method-assign]


MOMENTS: dict[str, Callable[[int], None]] = {
    "rollouts": while_rollouts_are_under_way,
    "sync": in_a_sync,
    "update": between_update_and_checkpoint,
    "checkpoint": while_a_checkpoint_is_written,
}

if __name__ == "__main__":
    moment, _, step = sys.argv.pop(1).partition(":")
    MOMENTS[moment](int(step))
    app()
