"""The order of conversations follows from seed and position, and no conversation is lost.

Each one is trained on, measured on, or reported.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_gptoss.samples import TrainingSamples
from rl_loop.conversations import rows, source_stream
from rl_loop.conversations.blocks import BlockJob, RenderPool
from rl_loop.conversations.config import DataConfig
from rl_loop.conversations.dataset import ConversationData, ConversationStream
from rl_loop.conversations.errors import DataError
from rl_loop.conversations.rejections import RejectionReport, generalize_reason
from rl_loop.harmony.codec import Harmony
from tests.support.rl_loop.conversations.written_by_hand import chat, said, user

LONG = 10_000


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of few conversations and windows of few blocks, so a small file has many."""
    monkeypatch.setattr(rows, "BLOCK_BYTES", 400)
    monkeypatch.setattr(source_stream, "WINDOW_BYTES", 2_000)


def write(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def questions(count: int, name: str = "q") -> list[dict[str, Any]]:
    """Return different conversations. Every third conversation has two turns."""
    made = []
    for i in range(count):
        messages = [user(f"{name} {i}"), said(f"a {i}")]
        if i % 3 == 0:
            messages += [user(f"{name} {i} again"), said(f"b {i}")]
        made.append(chat(*messages))
    return made


class Report(RejectionReport):
    """Report that keeps its records and messages."""

    def __init__(self, earlier: Sequence[dict[str, Any]] = ()) -> None:
        self.written: list[dict[str, Any]] = []
        self.shown: list[str] = []
        super().__init__(self.written.extend, self.shown.append, earlier)


def build_data(harmony: Harmony, **keys: Any) -> ConversationData:
    config = DataConfig.model_validate({"workers": 0} | keys)
    return ConversationData(config, harmony, LONG)


def texts(samples: TrainingSamples, harmony: Harmony) -> list[str]:
    return [harmony.decode(ids.tolist()) for ids in samples.rows("token_ids")]


def drain(stream: ConversationStream, harmony: Harmony, at_a_time: int = 7) -> list[str]:
    drained: list[str] = []
    while (samples := stream.take(at_a_time)) is not None:
        drained += texts(samples, harmony)
    return drained


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_stream, "WINDOW_BYTES", 1 << 20)


@pytest.fixture
def harmony(tiny: Harmony) -> Harmony:
    return tiny


# ---- order


@pytest.mark.usefixtures("small_windows")
def test_every_epoch_has_all_samples_in_another_order(tmp_path: Path, harmony: Harmony) -> None:
    path = write(tmp_path / "chats.jsonl", questions(100))
    with build_data(harmony, path=str(path), epochs=2) as data:
        drained = drain(data.stream(Report()), harmony)
        again = drain(data.stream(Report()), harmony)
    with build_data(harmony, path=str(path), epochs=1, shuffle=False) as data:
        in_order = drain(data.stream(Report()), harmony)

    assert len(in_order) == len(set(in_order)) == 134
    assert "q 0<" in in_order[0]
    assert "q 99 again" in in_order[-1]
    first, second = drained[:134], drained[134:]
    assert sorted(first) == sorted(second) == sorted(in_order)
    assert first != second
    assert first != in_order
    assert drained == again

    # Conversations move far, not only to adjacent positions.
    moved = [abs(in_order.index(text) - i) for i, text in enumerate(first)]
    assert sum(moved) / len(moved) > 20


@pytest.mark.usefixtures("small_windows")
def test_only_the_current_and_the_next_window_are_rendered(
    tmp_path: Path, harmony: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory does not grow with the file, because only one further window is rendered ahead."""
    submitted: list[int] = []
    submit = RenderPool.submit

    def counted(pool: RenderPool, jobs: Sequence[BlockJob]) -> Any:
        submitted.append(len(jobs))
        return submit(pool, jobs)

    monkeypatch.setattr(RenderPool, "submit", counted)
    path = write(tmp_path / "chats.jsonl", questions(300))
    with build_data(harmony, path=str(path), epochs=2) as data:
        stream = data.stream(Report())
        assert len(data._rows[0].blocks) > 10
        used = set()
        while not stream.exhausted:
            [source] = stream.state()["sources"].values()
            used.add((source["epoch"], source["window"]))
            assert len(submitted) <= len(used) + 1
            stream.take(1)
    assert len(submitted) == len(used) > 10


def test_file_of_one_block_is_shuffled(tmp_path: Path, harmony: Harmony) -> None:
    path = write(tmp_path / "chats.jsonl", questions(50))
    orders = []
    for keys in ({"shuffle": False}, {"seed": 0}, {"seed": 1}):
        with build_data(harmony, path=str(path), epochs=1, **keys) as data:
            assert len(data._rows[0].blocks) == 1
            orders.append(drain(data.stream(Report()), harmony))
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("seed", [0, 1])
def test_stream_resumed_at_any_sample_continues_identically(
    seed: int, tmp_path: Path, harmony: Harmony
) -> None:
    sources = {
        "long": {"path": str(write(tmp_path / "a.jsonl", questions(60, "long"))), "epochs": 2},
        "short": {"path": str(write(tmp_path / "b.jsonl", questions(10, "short"))), "weight": 0.5, "epochs": 3},
    }  # fmt: skip
    keys = {"sources": sources, "seed": seed, "validation_fraction": 0.1}
    with build_data(harmony, **keys) as data:
        stream = data.stream(Report())
        states, whole = [stream.state()], list[str]()
        while (samples := stream.take(1)) is not None:
            whole += texts(samples, harmony)
            states.append(stream.state())
        assert stream.exhausted
        assert len(whole) > 150

    with build_data(harmony, **keys) as data:
        for used in [*range(0, len(states), 5), len(whole) - 1, len(whole)]:
            saved = json.loads(json.dumps(states[used]))
            resumed = data.stream(Report(), saved)
            assert resumed.state() == states[used]
            assert drain(resumed, harmony) == whole[used:]
            assert resumed.state() == states[-1]


def test_parallel_rendering_equals_rendering_in_one_process(
    tmp_path: Path, harmony: Harmony
) -> None:
    path = write(tmp_path / "chats.jsonl", [*questions(300), {"messages": "none"}])
    drained = []
    for workers in (0, 2):
        with build_data(
            harmony, path=str(path), workers=workers, epochs=1, validation_fraction=0.1
        ) as data:
            report = Report()
            measured = data.validation(report)
            drained.append(
                (
                    texts(measured["data"], harmony),
                    drain(data.stream(report), harmony),
                    report.written,
                )
            )
    assert drained[0] == drained[1]
    assert len(drained[0][1]) > 300


def test_sources_are_mixed_by_their_weights(tmp_path: Path, harmony: Harmony) -> None:
    paths = {name: str(write(tmp_path / f"{name}.jsonl", questions(20, name))) for name in "ab"}
    sources = {"a": {"path": paths["a"], "weight": 3}, "b": {"path": paths["b"], "weight": 1}}
    with build_data(harmony, sources=sources) as data:
        samples = data.stream(Report()).take(640)
    assert samples is not None
    counts = Counter("b" if "b.jsonl" in name else "a" for name in samples.names)
    assert counts == {"a": 480, "b": 160}

    sources["b"]["weight"] = 0.001
    with pytest.raises(DataError, match=r"data.sources.b.weight \(0.001\) is less than 1/128"):
        build_data(harmony, sources=sources)


def test_exhausted_source_is_replaced_by_the_others(tmp_path: Path, harmony: Harmony) -> None:
    sources = {
        "a": {"path": str(write(tmp_path / "a.jsonl", questions(30, "long"))), "epochs": 1},
        "b": {"path": str(write(tmp_path / "b.jsonl", questions(3, "short"))), "epochs": 1},
    }
    with build_data(harmony, sources=sources) as data:
        drained = drain(data.stream(Report()), harmony)
    assert len(drained) == 40 + 4
    assert not any("short" in text for text in drained[20:])


def test_resume_is_rejected_if_a_data_file_has_changed(tmp_path: Path, harmony: Harmony) -> None:
    path = write(tmp_path / "chats.jsonl", questions(20))
    with build_data(harmony, path=str(path)) as data:
        stream = data.stream(Report())
        stream.take(3)
        saved = stream.state()
    write(path, questions(21))
    with (
        build_data(harmony, path=str(path)) as data,
        pytest.raises(DataError, match="has changed since the checkpoint was saved"),
    ):
        data.stream(Report(), saved)


def test_death_of_a_rendering_process_is_an_error(tmp_path: Path, harmony: Harmony) -> None:
    path = write(tmp_path / "chats.jsonl", questions(20))
    with build_data(harmony, path=str(path), workers=1) as data:
        data.stream(Report()).take(3)
        (pid,) = data._pool._executor._processes  # type: ignore[union-attr]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DataError, match="a process that renders conversations died"):
            data.stream(Report()).take(3)


# ---- files


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    yield


def talking() -> list[dict[str, Any]]:
    """Return conversations with keys that only some messages have, which Arrow adds to all."""
    described = {
        "name": "f",
        "description": "F.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
    other = {"id": "y", "type": "function", "function": {"name": "f", "arguments": {"day": 3}}}
    return [
        chat(user("a"), said("b", thinking="c"), tools=[]),
        chat(
            user("d"), {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "x", "content": "e"}, said("f", weight=1),
            tools=[{"type": "function", "function": described}],
        ),
        chat(user("g"), {"role": "assistant", "tool_calls": [other]}),
    ]  # fmt: skip


@pytest.mark.usefixtures("cache")
def test_parquet_and_hub_data_sets_equal_jsonl(tmp_path: Path, harmony: Harmony) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    write(tmp_path / "chats.jsonl", talking())
    (tmp_path / "hub").mkdir()
    for path in (tmp_path / "chats.parquet", tmp_path / "hub/train.parquet"):
        pq.write_table(pa.Table.from_pylist(talking()), path)

    drained = {}
    # load_dataset accepts a folder in place of a hub name. The hub cannot be reached here.
    for location in ("chats.jsonl", "chats.parquet", "hub"):
        path = f"{tmp_path}/{location}" if location != "hub" else f"hub:{tmp_path}/hub:train"
        with build_data(harmony, path=path, epochs=1, shuffle=False, workers=0) as data:
            drained[location] = drain(data.stream(Report()), harmony)
    assert len(drained["chats.jsonl"]) == 3
    assert drained["chats.parquet"] == drained["chats.jsonl"]
    assert drained["hub"] == drained["chats.jsonl"]


@pytest.mark.usefixtures("cache")
def test_data_columns_are_renamed_by_the_configuration(tmp_path: Path, harmony: Harmony) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain = [{**record, "tools": None} for record in talking()]
    renamed = [{"chat": record["messages"], "functions": None, "id": 7} for record in talking()]
    columns = {"messages": "chat", "tools": "functions"}
    write(tmp_path / "plain.jsonl", plain)
    write(tmp_path / "renamed.jsonl", renamed)
    pq.write_table(pa.Table.from_pylist(renamed), tmp_path / "renamed.parquet")

    def read(name: str, **keys: Any) -> list[str]:
        with build_data(
            harmony, path=str(tmp_path / name), epochs=1, shuffle=False, **keys
        ) as data:
            return drain(data.stream(Report()), harmony)

    expected = read("plain.jsonl")
    assert read("renamed.jsonl", columns=columns) == expected
    assert read("renamed.parquet", columns=columns) == expected
    with pytest.raises(
        DataError, match=r"`columns` refers to talk, but the row has chat, functions, id"
    ):
        read("renamed.jsonl", columns={"messages": "talk"})


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("none.jsonl", "there is no such file"),
        ("empty.jsonl", "the file is empty"),
        ("bad.parquet", "cannot be read"),
    ],
)
def test_unreadable_data_files_are_named(
    location: str, reason: str, tmp_path: Path, harmony: Harmony
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.parquet").write_text("no parquet")
    path = str(tmp_path / location)
    with pytest.raises(DataError, match=reason) as error:
        build_data(harmony, path=path)
    assert path in str(error.value)


# ---- rejected conversations


@pytest.mark.usefixtures("small_windows")
def test_rejected_line_is_reported_once_with_line_and_reason(
    tmp_path: Path, harmony: Harmony
) -> None:
    lines = [json.dumps(record) for record in questions(40)]
    lines[10] = '{"messages": ['
    lines[20] = ""
    lines[30] = json.dumps(chat(user("a")))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))

    report = Report()
    with build_data(harmony, path=str(tmp_path / "chats.jsonl"), epochs=2) as data:
        stream = data.stream(report)
        drained = drain(stream, harmony)
    assert len(drained) == 2 * (54 - 1 - 1 - 2)  # line 31 has two turns
    assert sorted((record["line"], record["reason"]) for record in report.written) == [
        (11, "not JSON: Expecting value at character 15"),
        (31, "it has no assistant message"),
    ]
    assert {record["source"] for record in report.written} == {"data"}
    assert len(report.shown) == 2
    assert any("chats.jsonl, line 11: not JSON" in shown for shown in report.shown)
    assert stream.streams[0].conversations == 39
    assert stream.streams[0].rejected == 2
    summary = report.summary()
    assert summary is not None and summary.startswith("2 rejected: 1 x ")

    # A resumed run reads the same lines again.
    resumed = Report(report.written)
    with build_data(harmony, path=str(tmp_path / "chats.jsonl"), epochs=1) as data:
        drain(data.stream(resumed), harmony)
    assert resumed.written == []
    assert resumed.summary() == summary


def test_file_with_too_many_rejected_lines_ends_the_run(tmp_path: Path, harmony: Harmony) -> None:
    records = questions(20)
    for i in range(3):
        records[5 * i] = chat(user("a"))
    path = write(tmp_path / "chats.jsonl", records)
    explained = (
        r"3 of 20 conversations are rejected, "
        r"more than data.max_rejected_fraction \(0.1\) allows: 3 x it has"
    )
    with build_data(harmony, path=str(path)) as data, pytest.raises(DataError, match=explained):
        data.check()
    with build_data(harmony, path=str(path)) as data, pytest.raises(DataError, match=explained):
        data.stream(Report())
    with build_data(harmony, path=str(path), max_rejected_fraction=0.2) as data:
        data.check()
        data.stream(Report())


def test_file_without_usable_conversations_is_rejected(tmp_path: Path, harmony: Harmony) -> None:
    path = write(tmp_path / "chats.jsonl", [chat(user("a"))] * 3)
    with (
        build_data(harmony, path=str(path), max_rejected_fraction=1) as data,
        pytest.raises(
            DataError, match="no conversation can be used: 3 x it has no assistant message"
        ),
    ):
        data.stream(Report())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("message 3: it calls functions.a, which is not described (described: b, c)",
         "message 12: it calls functions.x, which is not described (described: y)"),
        ("it has 1034 tokens, more than data.max_tokens (1000)", "it has 9 tokens, more than data.max_tokens (8)"),
        ("message 1 (role 'tool'): no open call with id 'c9' precedes this tool output",
         "message 2 (role 'tool'): no open call with id 'a' precedes this tool output"),
    ],
)  # fmt: skip
def test_reasons_with_other_names_and_numbers_are_one_kind(one: str, other: str) -> None:
    assert generalize_reason(one) == generalize_reason(other)
    assert generalize_reason(one) != generalize_reason("it has no assistant message")


# ---- validation


def test_validation_samples_and_copies_are_never_trained_on(
    tmp_path: Path, harmony: Harmony
) -> None:
    path = write(tmp_path / "chats.jsonl", [*questions(200), *questions(200)])
    keys = {"path": str(path), "epochs": 1, "validation_fraction": 0.2}
    with build_data(harmony, **keys, validation_conversations=400) as data:
        measured = texts(data.validation(Report())["data"], harmony)
        trained = drain(data.stream(Report()), harmony)
    assert not set(measured) & set(trained)
    assert len(measured) + len(trained) == 2 * 267
    assert 0.1 < len(measured) / (2 * 267) < 0.3

    with build_data(harmony, **keys, validation_conversations=5) as data:
        few = data.validation(Report())["data"]
    assert len({name.rpartition(" ")[2] for name in few.names}) == 5
    assert texts(few, harmony) == measured[: len(few)]

    with build_data(harmony, **keys, seed=1, validation_conversations=400) as data:
        assert texts(data.validation(Report())["data"], harmony) != measured


def test_validation_reads_a_separate_file_if_configured(tmp_path: Path, harmony: Harmony) -> None:
    train = str(write(tmp_path / "train.jsonl", questions(30)))
    held_out = str(write(tmp_path / "held_out.jsonl", questions(7, "v")))
    sources = {
        "a": {"path": train, "epochs": 1},
        "b": {"path": train, "epochs": 1, "validation_path": held_out},
    }
    with build_data(harmony, sources=sources) as data:
        measured = data.validation(Report())
        assert list(measured) == ["b"]
        assert len(measured["b"]) == 10
        assert all("held_out.jsonl" in name for name in measured["b"].names)
        assert len(drain(data.stream(Report()), harmony)) == 80


def test_validation_fraction_without_any_sample_is_rejected(
    tmp_path: Path, harmony: Harmony
) -> None:
    path = write(tmp_path / "chats.jsonl", questions(3))
    with (
        build_data(harmony, path=str(path), validation_fraction=0.0001) as data,
        pytest.raises(
            DataError, match=r"no conversation of data\.sources\.data is left for validation"
        ),
    ):
        data.validation(Report())
