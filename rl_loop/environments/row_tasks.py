"""Tasks from JSON objects of the user: rows of a file, or results of a generator function."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from rl_loop.environments.base import InvalidRowError, Split, Task, text_in
from rl_loop.registry import Registry

FUNCTIONS: Registry[Callable[..., Any]] = Registry(
    kind="function of an environment", expected="a function", accepts=callable
)
"""Registry without entries, because users name functions as MODULE:FUNCTION."""


def check_function(path: str | None) -> str | None:
    """Return ``path``, an option MODULE:FUNCTION. Raises ValueError if there is no such function."""
    if path is not None:
        FUNCTIONS.resolve(path)
    return path


def generated_task(
    from_record: Callable[[dict[str, Any], str, Any], Task],
    path: str | None,
    split: Split,
    seed: int,
    index: int,
    options: Any,
) -> Task:
    """Return the task of the row that a function generates.

    Args:
        from_record: method of the environment that reads the row.
        path: function ``tasks(split, seed, index)`` as MODULE:FUNCTION.
        split: "train" or "held_out".
        seed: seed of the tasks.
        index: position of the task in its split.
        options: options of the environment.

    Raises:
        NotImplementedError: if ``path`` is None.
        InvalidRowError: if the function does not return a JSON object that is a task.
    """
    if path is None:
        raise NotImplementedError(
            "option tasks is null, so tasks cannot be generated. Set it, or train_path and held_out_path"
        )
    row = FUNCTIONS.resolve(path)(split, seed, index)
    where = f"{path}({split!r}, {seed}, {index})"
    if not isinstance(row, dict):
        raise InvalidRowError(f"{where} returned {type(row).__name__}, expected a dict")
    try:
        return from_record(row, f"{split}-{index}", options)
    except KeyError as error:
        keys = ", ".join(map(str, row)) or "no keys"
        raise InvalidRowError(
            f"{where} returned a task without the key {error}; it has {keys}"
        ) from None
    except ValueError as error:
        raise InvalidRowError(f"{where} returned a task that cannot be used: {error}") from None


def row_task(
    environment: str,
    row: dict[str, Any],
    name: str,
    options: BaseModel,
    *,
    instructions: str | None = None,
) -> Task:
    """Return the task of a row.

    Args:
        environment: name of the environment.
        row: JSON object with the text ``prompt``, which becomes the user message.
        name: id of the task.
        options: options of the environment.
        instructions: developer message; None for none.

    Raises:
        KeyError: if the row has no ``prompt``.
        ValueError: if ``prompt`` is not text.
    """
    messages = [{"role": "user", "content": text_in(row, "prompt")}]
    if instructions is not None:
        messages.insert(0, {"role": "developer", "content": instructions})

    # Row and options are in the task, because a rollout worker gets only the task.
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


def read_row(task: Task) -> dict[str, Any]:
    """Return the row of a task. Raises ValueError if the task was not created by ``row_task``."""
    # A task in a file may name this environment without having come from ``row_task``.
    missing = [key for key in ("record", "options") if key not in task.metadata]
    if missing:
        raise ValueError(
            f"task {task.task_id}: its metadata has no {missing[0]}. Write a row as a JSON object with "
            'the text "prompt", without task_id and messages'
        )
    row: dict[str, Any] = task.metadata["record"]
    return row
