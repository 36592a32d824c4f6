"""Records of an evaluation, one per episode, as JSON lines.

``gptoss eval`` writes them. Its statistics and the filter by pass rate read them.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_loop.tasks.task_file import TaskFileError

KEYS = {"task_id", "sample", "reward_parts", "answer", "category"}
"""Keys of every record."""


def read_evaluation(path: Path) -> list[dict[str, Any]]:
    """Read the records of an evaluation. Raises TaskFileError if the file has none."""
    try:
        # Not splitlines, which also splits at characters such as U+2028 within a text.
        records = [json.loads(line) for line in path.read_text().split("\n") if line]
        # Any file of JSON lines may be named here by mistake.
        complete = all(set(record) >= KEYS for record in records)
    except (OSError, ValueError, TypeError) as error:
        raise TaskFileError(f"{path}: cannot be read: {error}") from None

    if not records or not complete:
        raise TaskFileError(f"{path}: not the episodes of an evaluation")
    return records


def by_task(records: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group records by task_id and sort each group by sample."""
    tasks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    # Episodes end in any order.
    for record in sorted(records, key=lambda record: record["sample"]):
        tasks[record["task_id"]].append(record)
    return tasks


def pass_rates(records: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the share of correct episodes by task_id."""
    return {
        task_id: sum(is_correct(episode) for episode in episodes) / len(episodes)
        for task_id, episodes in by_task(records).items()
    }


def is_correct(record: dict[str, Any]) -> bool:
    """Return True if the episode was correct."""
    return bool(record["reward_parts"]["correct"])
