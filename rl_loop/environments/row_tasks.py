"""Tasks that are JSON objects of the user's: rows of a file, or what a function of theirs generates."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from rl_loop.environments.base import Split, Task, text_in
from rl_loop.registry import Registry

FUNCTIONS: Registry[Callable[..., Any]] = Registry(
    kind="function of an environment", expected="a function", accepts=callable
)
"""Has no entries: users' functions are named as MODULE:FUNCTION."""


def check_function(path: str | None) -> str | None:
    """Return the name of a function that an option gives. Raises ValueError if there is none."""
    if path is not None:
        FUNCTIONS.resolve(path)
    return path


def generated_row(path: str | None, split: Split, seed: int, index: int) -> dict[str, Any]:
    """Return what the function ``path`` makes of these.

    Raises NotImplementedError without a function, and ValueError for what is no JSON object."""
    if path is None:
        raise NotImplementedError(
            "without `tasks` nothing is generated: give train_path and held_out_path"
        )
    row = FUNCTIONS.resolve(path)(split, seed, index)
    if not isinstance(row, dict):
        raise ValueError(f"{path} returned {type(row).__name__}, expected a dict")
    return row


def row_task(
    environment: str,
    row: dict[str, Any],
    name: str,
    options: BaseModel,
    *,
    instructions: str | None = None,
) -> Task:
    """Make the task of a row: its text ``prompt`` is the user's, behind the developer's
    ``instructions``. Raises KeyError or ValueError for a row without one."""
    messages = [{"role": "user", "content": text_in(row, "prompt")}]
    if instructions is not None:
        messages.insert(0, {"role": "developer", "content": instructions})

    metadata: dict[str, Any] = {"record": row, "options": options.model_dump(mode="json")}
    if "category" in row:
        metadata["category"] = row["category"]
    return Task(
        task_id=name,
        messages=messages,
        ground_truth=str(row.get("answer", "")),
        environment=environment,
        metadata=metadata,
    )


def row_of(task: Task) -> dict[str, Any]:
    """Return the row that a task was made of. Raises ValueError for a task that was made otherwise."""
    missing = [key for key in ("record", "options") if key not in task.metadata]
    if missing:
        raise ValueError(
            f"task {task.task_id} is made of no row (no {missing[0]} in its metadata): a row is a "
            'JSON object with the text "prompt", without task_id and messages'
        )
    row: dict[str, Any] = task.metadata["record"]
    return row
