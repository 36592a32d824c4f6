"""Task files: round trips, formats, and errors that name the bad line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_loop.environments import ENVIRONMENTS, Task
from rl_loop.environments.retool import ReToolEnvironment, ReToolOptions
from rl_loop.tasks.task_file import TaskData, TaskFileError
from tests.support.rl_loop.environments import reversing

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def read_tasks(path: Path) -> list[Task]:
    return list(TaskData(str(path), "retool", ReToolEnvironment, ReToolOptions()))


GOOD: dict[str, Any] = {
    "task_id": "a",
    "messages": [{"role": "user", "content": "1+1?"}],
    "ground_truth": "2",
}


def with_(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


def with_messages(*messages: dict[str, Any]) -> str:
    return with_(messages=list(messages))


def without(key: str) -> str:
    return json.dumps({name: value for name, value in GOOD.items() if name != key})


def verl(prompt: Any) -> str:
    return json.dumps({"prompt": prompt, "reward_model": {"ground_truth": "4"}, "data_source": "x"})


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(TEXT.filter(bool), TEXT, TEXT), min_size=1, max_size=5, unique_by=lambda t: t[0]
    )
)
def test_written_tasks_are_read_unchanged(
    tmp_path_factory, rows: list[tuple[str, str, str]]
) -> None:
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    tasks = [
        Task(a, [{"role": "user", "content": b}], c, metadata={"level": len(b)}) for a, b, c in rows
    ]
    path.write_text("\n\n".join(task.to_json() for task in tasks))
    assert read_tasks(path) == tasks


def test_rows_run_in_the_environment_that_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "words.jsonl"
    path.write_text('{"word": "drawer"}\n')
    environment = reversing.ReversingEnvironment
    data = TaskData(str(path), reversing.NAME, environment, environment.Options())
    # from_record does not name the environment: the class does not know its MODULE:CLASS.
    assert [task.environment for task in data] == [reversing.NAME]


def test_line_separators_inside_a_text_do_not_split_the_line(tmp_path: Path) -> None:
    task = {**GOOD, "ground_truth": "a\u2028b\x85c"}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(task, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [t.ground_truth for t in read_tasks(path)] == ["a\u2028b\x85c"]


NOT_A_TASK = {
    "half an object": ("{", "not JSON: Expecting property name"),
    "a list": ("[]", "must be a JSON object, not an empty list"),
    "a number": ("3", "must be a JSON object, not a number"),
    "null": ("null", "must be a JSON object, not null"),
    "two objects": ("{} {}", "not JSON: Extra data at character 4"),
    "no task_id": (without("task_id"), "a task needs task_id; the row has messages, ground_truth"),
    "no ground_truth": (
        without("ground_truth"),
        "a task needs ground_truth; the row has task_id, messages",
    ),
    "no messages": (
        without("messages"),
        "a task needs messages; the row has task_id, ground_truth",
    ),
    "an unknown key": (
        with_(color=1),
        "color: unknown key of a task. Known keys: task_id, messages",
    ),
    "an empty id": (with_(task_id=""), "'task_id' is empty"),
    "an id that is a number": (with_(task_id=7), "'task_id' must be text, not a number"),
    "a ground truth that is a number": (
        with_(ground_truth=2),
        "'ground_truth' must be text, not a number",
    ),
    "a ground truth that is null": (
        with_(ground_truth=None),
        "'ground_truth' must be text, not null",
    ),
    "a ground truth that is no text": (
        with_(ground_truth="\ud800"),
        "'ground_truth' has half of a surrogate pair",
    ),
    "no message": (
        with_(messages=[]),
        "'messages' must be a list of at least one message, not an empty list",
    ),
    "text for messages": (
        with_(messages="1+1?"),
        "'messages' must be a list of at least one message, not text",
    ),
    "a message that is text": (with_(messages=["1+1?"]), "'messages': message 0"),
    "an unknown role": (
        with_messages({"role": "critic", "content": "x"}),
        "message 0 (role 'critic')",
    ),
    "a message that ends the episode": (
        with_messages({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}),
        "'messages': the prompt ends with an assistant message",
    ),
    "content that is null": (
        with_messages({"role": "user", "content": None}),
        "'content' must be text",
    ),
    "no content": (with_messages({"role": "user"}), "'content' must be text"),
    "an image": (
        with_messages({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}),
        "only text can be rendered",
    ),
    "a key that no prompt can show": (
        with_messages(
            {"role": "user", "content": "x"}, {"role": "user", "content": "x", "weight": 2}
        ),
        "message 1 (role 'user'): 'weight' cannot be rendered",
    ),
    "an answer without a call": (
        with_messages({"role": "tool", "content": "x"}, {"role": "user", "content": "x"}),
        "message 0 (role 'tool'): no open call precedes this tool output",
    ),
    "half of a surrogate pair": (with_messages({"role": "user", "content": "\ud800"}), "surrogate"),
    "metadata that is a number": (with_(metadata=3), "'metadata' must be an object, not a number"),
    "an unknown environment": (with_(environment="chess"), "no environment 'chess'"),
    "an environment that is a list": (
        with_(environment=["retool"]),
        "'environment' must be text, not a list",
    ),
    "an id that is there": (
        with_(task_id="first"),
        "task_id 'first' is not unique, also in line 1",
    ),
    "endless brackets": ("[" * 100_000, "too many nested levels"),
    "bytes": (b"\xff\xfe", "not UTF-8: byte 0 is 0xff"),
    "neither a task nor a problem": (
        '{"color": 1}',
        "environment ReToolEnvironment needs the key 'question', but the row has color",
    ),
    "no answer": (
        '{"question": "1+1?"}',
        "environment ReToolEnvironment needs the key 'answer', but the row has question",
    ),
    "an answer that is a list": (
        '{"question": "1+1?", "answer": [2]}',
        "'answer' must be text, not list",
    ),
    "a question that is null": (
        '{"question": null, "answer": "2"}',
        "'question' must be text, not NoneType",
    ),
    "verl without messages": (verl([]), "'prompt' must be text or a list of messages"),
    "verl with a number": (verl(3), "'prompt' must be text or a list of messages, not int"),
    "verl with an unknown role": (verl([{"role": "critic", "content": "x"}]), "(role 'critic')"),
    "verl without ground truth": (
        '{"prompt": "x", "reward_model": {}}',
        "needs the key 'ground_truth'",
    ),
    "verl with a text for the reward": (
        '{"prompt": "x", "reward_model": "rule"}',
        "'reward_model' must be an object",
    ),
}


@pytest.mark.parametrize("name", NOT_A_TASK)
def test_bad_line_is_named_with_its_file_and_key(tmp_path: Path, name: str) -> None:
    line, message = NOT_A_TASK[name]
    path = tmp_path / "tasks.jsonl"
    raw = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(json.dumps({**GOOD, "task_id": "first"}).encode() + b"\n\n" + raw + b"\n")
    with pytest.raises(TaskFileError) as caught:
        read_tasks(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    for word in ("argument", "NoneType' object", "Error", "codec", "zip("):
        assert word not in str(caught.value), "that is Python's way to say it"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ROW_KEYS = [
    "task_id",
    "messages",
    "ground_truth",
    "environment",
    "metadata",
    "prompt",
    "reward_model",
    "question",
]
ROW_KEYS += ["answer", "problem", "role", "content", "key", "instruction_id_list", "kwargs"]
ROWS = st.dictionaries(st.sampled_from(ROW_KEYS), VALUES, max_size=6)


@settings(deadline=None, max_examples=300)
@given(ROWS, st.sampled_from(["retool", "gsm8k", "instructions"]))
def test_random_row_is_a_task_or_an_error_of_one_line(
    tmp_path_factory, row: dict[str, object], name: str
) -> None:
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    path.write_text(json.dumps(row) + "\n")
    environment = ENVIRONMENTS.resolve(name)
    try:
        tasks = list(TaskData(str(path), name, environment, environment.Options()))
    except TaskFileError as error:
        assert str(error).startswith(str(path))
        assert "\n" not in str(error).removeprefix(str(path)).rpartition("row has")[0]
        return
    assert [task.environment for task in tasks]


def test_conversation_keeps_its_system_message_and_earlier_turns(tmp_path: Path) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And twice that?"},
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text(verl(conversation) + "\n")

    plain = TaskData(str(path), "retool", ReToolEnvironment, ReToolOptions(instructions=None))[0]
    assert plain.messages == conversation

    instructed = TaskData(
        str(path), "retool", ReToolEnvironment, ReToolOptions(instructions="Use boxes.")
    )[0]
    assert instructed.messages[0] == {"role": "system", "content": "Be brief.\n\nUse boxes."}
    assert instructed.messages[1:] == conversation[1:]

    path.write_text(verl(conversation[1:]) + "\n")
    (task,) = TaskData(
        str(path), "retool", ReToolEnvironment, ReToolOptions(instructions="Use boxes.")
    )
    assert task.messages == [{"role": "developer", "content": "Use boxes."}, *conversation[1:]]


def test_conversation_is_rendered_completely(tmp_path: Path, full) -> None:
    path = tmp_path / "tasks.jsonl"
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "And twice that?"},
    ]
    path.write_text(verl(conversation) + "\n")
    (task,) = read_tasks(path)
    text = full.decode(full.render_prompt(task.messages))
    for message in conversation:
        assert message["content"] in text


def test_numeric_ground_truths_become_text(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        '{"question": "1+1?", "answer": 2}\n{"prompt": "1/2?", "reward_model": {"ground_truth": 0.5}}\n'
    )
    assert [task.ground_truth for task in read_tasks(path)] == ["2", "0.5"]


def test_empty_parquet_fields_count_as_missing(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {**GOOD, "task_id": "a", "metadata": {"level": 1}, "environment": "gsm8k"},
        {**GOOD, "task_id": "b", "metadata": None, "environment": None},
    ]
    path = tmp_path / "tasks.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    first, second = read_tasks(path)
    assert (first.metadata, first.environment) == ({"level": 1}, "gsm8k")
    assert (second.metadata, second.environment) == ({}, "retool")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*rows, {**GOOD, "task_id": "a"}]), path)
    with pytest.raises(
        TaskFileError, match=r"tasks\.parquet, row 3: task_id 'a' is not unique, also in row 1"
    ):
        read_tasks(path)


def test_files_without_tasks_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("empty", "bytes", "missing"):
        with pytest.raises(TaskFileError, match=str(tmp_path / name)):
            read_tasks(tmp_path / name)


def test_mapped_columns_are_read_under_the_expected_names(
    tmp_path: Path,
) -> None:
    path = tmp_path / "math.jsonl"
    rows = [
        {"exercise": "1+1?", "solution": "2", "level": 3},
        {"exercise": "1+2?", "solution": "3"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def read(**columns: str) -> list[Task]:
        options = ReToolOptions(instructions=None)
        return list(TaskData(str(path), "retool", ReToolEnvironment, options, "m-", columns))

    tasks = read(question="exercise", answer="solution")
    assert [task.messages[0]["content"] for task in tasks] == ["1+1?", "1+2?"]
    assert [task.ground_truth for task in tasks] == ["2", "3"]

    wrong = r"math.jsonl, line 2: `columns` refers to level, but the row has exercise, solution"
    with pytest.raises(TaskFileError, match=wrong):
        read(question="exercise", answer="solution", metadata="level")

    # Tasks with messages need no ids if columns are mapped.
    path.write_text('{"chat": [{"role": "user", "content": "1+1?"}], "truth": "2", "other": 1}\n')
    (task,) = read(messages="chat", ground_truth="truth")
    assert (task.task_id, task.messages[0]["content"]) == ("m-0", "1+1?")
