"""Selection of a source's training tasks by pass rate: the share of correct episodes."""

import random
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

from rl_loop.config.tasks import PassRateConfig
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.tasks.evaluation_records import pass_rates, read_evaluation
from rl_loop.tasks.task_file import TaskFileError

MIN_PROBABILITY = 0.05
"""Minimum probability of using a task. Without it, a step could search a solved file forever."""


class TaskSelection:
    """Skips training tasks whose newest pass rates in this run were outside of the limits.

    A task is used with probability ``retry`` ** n after n groups in a row outside of the limits
    (GRESO, arXiv 2506.02177). A group within the limits resets n to 0.

    The choice depends only on seed, position and the groups of steps that have ended before a step
    could begin. Therefore a resumed run chooses the same tasks.
    """

    def __init__(self, limits: PassRateConfig, seed: str, delay: int) -> None:
        """Begin without measured pass rates.

        Args:
            limits: limits and the probability ``retry``.
            seed: seed of the choices.
            delay: number of steps that may begin before a step has ended.
        """
        assert limits.retry is not None
        self._limits = limits
        self._retry = limits.retry
        self._seed = seed
        self._delay = delay

        # The collector's thread selects tasks while the loop adds groups.
        self._lock = Lock()
        self._outside: dict[str, int] = {}
        """Groups in a row that were outside, by task, without the steps in ``_recent``."""
        self._recent: dict[int, dict[str, list[bool]]] = {}
        """Groups of the last ``delay`` steps by step and task: True for outside."""

    def mark_outside(self, task_ids: Iterable[str]) -> None:
        """Count one group outside of the limits for each of these tasks."""
        self._outside |= dict.fromkeys(task_ids, 1)

    def skips(self, task_id: str, position: int, step: int) -> bool:
        """Return True if a step leaves out the task at a position.

        Args:
            task_id: task at the position.
            position: training position of the task.
            step: number of the step, from 0.
        """
        with self._lock:
            streak = self._outside.get(task_id, 0)
            for ended in sorted(self._recent):
                # A step may begin before later steps have ended, so their groups never count.
                if ended < step - self._delay:
                    streak = _extend_streak(streak, self._recent[ended].get(task_id, ()))
        if streak == 0:
            return False
        probability = max(self._retry**streak, MIN_PROBABILITY)
        return random.Random(f"{self._seed}/{position}").random() >= probability

    def add_groups(self, step: int, groups: Iterable[TrajectoryGroup]) -> None:
        """Add the pass rates of a step that has ended."""
        measured: dict[str, list[bool]] = {}
        for group in groups:
            # Infrastructure failures can leave a group without episodes, which measures nothing.
            if group.trajectories:
                rate = pass_rate(group)
                is_outside = not self._limits.minimum <= rate <= self._limits.maximum
                measured.setdefault(group.task_id, []).append(is_outside)

        with self._lock:
            self._recent[step] = measured
            # A resume repeats no step before this one, so these groups count for every later step.
            for ended in sorted(self._recent):
                if ended <= step - self._delay:
                    self._merge(self._recent.pop(ended))

    def state(self) -> dict[str, Any]:
        """Return the measured pass rates as JSON for a checkpoint."""
        with self._lock:
            recent = {str(step): dict(groups) for step, groups in self._recent.items()}
            return {"outside": dict(self._outside), "recent": recent}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from the result of ``state``."""
        self._outside = dict(saved["outside"])
        self._recent = {int(step): groups for step, groups in saved["recent"].items()}

    def _merge(self, groups: Mapping[str, list[bool]]) -> None:
        for task_id, outside in groups.items():
            streak = _extend_streak(self._outside.pop(task_id, 0), outside)
            # A checkpoint contains only the tasks that may be skipped.
            if streak > 0:
                self._outside[task_id] = streak


def pass_rate(group: TrajectoryGroup) -> float:
    """Return the share of correct episodes of a group with episodes."""
    correct = [episode.reward_parts.get("correct", 0.0) for episode in group.trajectories]
    return sum(correct) / len(correct)


def evaluated_within(limits: PassRateConfig, source: str, row_ids: Sequence[str]) -> list[bool]:
    """Return a boolean per training task: True within the limits, or if it was not evaluated.

    Args:
        limits: limits, and the episodes of the evaluation.
        source: name of the tasks' source.
        row_ids: ids of the tasks without a prefix.

    Raises:
        TaskFileError: if no task was evaluated.
    """
    assert limits.episodes is not None
    evaluated = pass_rates(read_evaluation(limits.episodes))
    # In the evaluation, the id of the task is the id of the row, with or without the prefix of
    # held-out tasks.
    prefix = f"{source}-held_out-"
    rates = [evaluated.get(f"{prefix}{row_id}", evaluated.get(row_id)) for row_id in row_ids]
    # With the file of another evaluation, the filter would silently keep every task.
    if all(rate is None for rate in rates):
        raise TaskFileError(
            f"{limits.episodes}: contains no training task of tasks.sources.{source}, such as "
            f"the task_id {prefix}{row_ids[0]}. Evaluate train_path as held_out_path of a source "
            "with the same name"
        )
    return [rate is None or limits.minimum <= rate <= limits.maximum for rate in rates]


def _extend_streak(streak: int, outside: Iterable[bool]) -> int:
    """Return the groups in a row that were outside, after further groups."""
    for is_outside in outside:
        streak = streak + 1 if is_outside else 0
    return streak
