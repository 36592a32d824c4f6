"""A loop with scripted rollouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

from rl_loop.config.run import RlConfig
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup, WeightVersionSpan
from rl_loop.loop import RlLoop
from rl_loop.rollout.group_stream import AdmittedGroup, GroupRequest, GroupStream
from rl_loop.run_parts import build_tasks
from rl_loop.trainer.checkpointer import Checkpointer, RunState


def from_file(directory: Path, tasks: int) -> list[str]:
    """Return overrides that train on a file with ``tasks`` tasks."""
    questions = [
        {"problem": f"What is {i} + {i + 1}?", "answer": str(2 * i + 1)} for i in range(tasks)
    ]
    held_out = [{"problem": "What is 1 * 2?", "answer": "2"}]
    for name, rows in (("train", questions), ("held_out", held_out)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = (
        f"environment: retool, options: {{instructions: null}}, train_path: {directory}/train.jsonl"
    )
    return [
        f"tasks={{sources: {{retool: {{{source}, held_out_path: {directory}/held_out.jsonl}}}}}}"
    ]


def answered(request: GroupRequest, version: int, rewards: Sequence[float]) -> TrajectoryGroup:
    """Return episodes of one sampled token each, with these rewards."""
    episodes = [
        Trajectory(
            request.task.task_id,
            token_ids=[10, 11, 12],
            loss_mask=[0, 0, 1],
            rollout_log_probs=[0.0, 0.0, -1.0],
            weight_versions=[WeightVersionSpan(2, 3, version)],
            reward=rewards[i % len(rewards)],
            reward_parts={"correct": 0.0, "format_error": 0.0, "score": rewards[i % len(rewards)]},
        )
        for i in range(len(request.seeds))
    ]
    return TrajectoryGroup(request.task.task_id, episodes)


class FakeRollouts:
    """Records the requested tasks. ``signal`` returns True for tasks with a learning signal."""

    def __init__(self, signal: Callable[[str], bool]) -> None:
        self.signal, self.asked, self.version = signal, list[str](), 0

    def stream(self) -> GroupStream:
        return GroupStream(self.begin)

    def begin(self, admitted: AdmittedGroup) -> None:
        task_id = admitted.request.task.task_id
        self.asked.append(task_id)
        rewards = (-1.0, 1.0) if self.signal(task_id) else (1.0,)
        admitted.end(answered(admitted.request, self.version, rewards))


class Silent:
    """A progress display that shows nothing."""

    def episodes(self, ended: int, wanted: int) -> None: ...


def loop_over(settings: RlConfig, rollouts: FakeRollouts, state: RunState) -> RlLoop:
    """Return a loop with real tasks and no trainer."""
    return RlLoop(
        settings,
        trainer=None,  # type: ignore[arg-type]
        rollouts=rollouts,  # type: ignore[arg-type]
        tasks=build_tasks(settings),
        recorder=SimpleNamespace(progress=Silent()),  # type: ignore[arg-type]
        checkpointer=Checkpointer(None, state, settings.training),  # type: ignore[arg-type]
    )
