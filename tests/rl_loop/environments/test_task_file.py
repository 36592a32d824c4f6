"""Task files: what is written is read, and a bad line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_loop.environments import Task, TaskFileError
from rl_loop.environments.retool import ReToolEnvironment, ReToolOptions
from rl_loop.environments.task_file import TaskData

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def read_tasks(path: Path) -> list[Task]:
    return list(TaskData(str(path), "retool", ReToolEnvironment, ReToolOptions()))


GOOD = {"task_id": "a", "messages": [{"role": "user", "content": "1+1?"}], "ground_truth": "2"}


@settings(deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=5, unique_by=lambda t: t[0]))
def test_tasks_that_were_written_are_read(tmp_path_factory, rows: list[tuple[str, str, str]]) -> None:
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    tasks = [Task(a, [{"role": "user", "content": b}], c, metadata={"level": len(b)}) for a, b, c in rows]
    path.write_text("\n\n".join(task.to_json() for task in tasks))
    assert read_tasks(path) == tasks


def test_line_separators_inside_a_text_do_not_split_the_line(tmp_path: Path) -> None:
    task = {**GOOD, "ground_truth": "a\u2028b\x85c"}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(task, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [t.ground_truth for t in read_tasks(path)] == ["a\u2028b\x85c"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ("3", "must be a JSON object"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "ground_truth"}), "ground_truth"),
        (json.dumps({**GOOD, "colour": 1}), "colour"),
        (json.dumps({**GOOD, "ground_truth": 2}), "must be text"),
        (json.dumps({**GOOD, "messages": []}), "messages"),
        (json.dumps({**GOOD, "messages": [{"role": "system", "content": "x"}]}), "messages"),
        (json.dumps({**GOOD, "messages": [{"role": "user", "content": None}]}), "messages"),
        (json.dumps({**GOOD, "messages": [{"role": "user"}]}), "messages"),
        (json.dumps({**GOOD, "metadata": 3}), "metadata"),
        (json.dumps({**GOOD, "environment": "chess"}), "no environment 'chess'"),
        (json.dumps({**GOOD, "environment": ["retool"]}), "must be text"),
        (json.dumps({**GOOD, "messages": [{"role": "user", "content": "\ud800"}]}), "surrogates"),
        (json.dumps({**GOOD, "task_id": "first"}), "'first' is there twice"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({**GOOD, "task_id": "first"}) + "\n\n" + line + "\n")
    with pytest.raises(TaskFileError) as caught:
        read_tasks(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert message in str(caught.value)


def test_files_that_hold_no_tasks_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("empty", "bytes", "missing"):
        with pytest.raises(TaskFileError, match=str(tmp_path / name)):
            read_tasks(tmp_path / name)
