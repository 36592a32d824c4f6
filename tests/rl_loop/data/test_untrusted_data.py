"""Untrusted data files that would exhaust memory or run code are rejected, naming the file."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_loop.config.errors import ConfigError
from rl_loop.config.load import read_yaml
from rl_loop.conversations.errors import DataError
from rl_loop.conversations.rows import open_rows
from rl_loop.data import untrusted_data
from rl_loop.data.untrusted_data import check_parquet
from rl_loop.rollout.group_store import GroupStore
from rl_loop.tasks.task_file import TaskFileError, _open_rows

# -- Parquet ---------------------------------------------------------------------------------------


def chat(rows: int, text: str) -> pa.Table:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    return pa.table({"messages": pa.array([messages] * rows, type=kind)})


def refused(path: Path, message: str) -> None:
    """Both readers of Parquet refuse the file."""
    with pytest.raises(DataError, match=message) as conversations:
        open_rows(str(path))
    with pytest.raises(TaskFileError, match=message) as tasks:
        _open_rows(str(path))
    for error in (conversations, tasks):
        assert str(path) in str(error.value)


def test_parquet_bomb_of_repeated_text_is_rejected_undecoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of 1 MB is stored once and referenced 40,000 times: 40 GB of text."""
    monkeypatch.setattr(untrusted_data, "ALWAYS_ALLOWED_BYTES", 1 << 26)
    path = tmp_path / "bomb.parquet"
    text = pa.array(["x" * 1_000_000])
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(40_000, np.int32)), text)
    pq.write_table(pa.table({"messages": column}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 10_000
    assert pq.read_metadata(path).row_group(0).total_byte_size < 2_000_000
    assert pq.read_schema(path).field("messages").type == pa.string()
    refused(path, r"bytes may decode to at most .* it has more\. The file was not read")


def test_parquet_file_that_exceeds_the_memory_limit_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch exceeds the memory limit of the process that measures the decoded size."""
    path = tmp_path / "bomb.parquet"
    monkeypatch.setattr(untrusted_data, "MAX_MEMORY_BYTES", 1 << 30)
    text = pa.array(["x" * 8_000_000])
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(256, np.int32)), text)
    pq.write_table(pa.table({"messages": column}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 100_000
    with pytest.raises(
        ValueError, match=r"decoding needs more than 1024 MiB of memory: .*(malloc|emory)"
    ):
        check_parquet(path)


def test_parquet_bomb_with_true_footer_is_rejected_by_the_footer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untrusted_data, "ALWAYS_ALLOWED_BYTES", 1 << 24)
    path = tmp_path / "bomb.parquet"
    table = pa.table({"messages": ["0" * (1 << 20)] * 20})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 50_000
    monkeypatch.setattr(untrusted_data.subprocess, "run", lambda *_, **__: pytest.fail("decoded"))
    refused(path, "it declares 20,97.* The file was not read")


def test_parquet_rows_without_stored_bytes_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"messages": pa.nulls(5_000_000, pa.string())}), path)
    refused(path, "declares 5,000,000 rows in only .* bytes")


def test_repetitive_text_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "honest.parquet"
    pq.write_table(chat(20_000, "The same answer to everybody. " * 10), path)
    check_parquet(path)
    assert len(_open_rows(str(path))) == 20_000


# -- JSONL -----------------------------------------------------------------------------------------


def test_too_long_line_is_rejected_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untrusted_data, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "long.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"a": 1}\n{"b": "')
        file.truncate(1 << 30)  # 1 GB of zeros in a sparse file
    for read, error in ((open_rows, DataError), (_open_rows, TaskFileError)):
        tracemalloc.start()
        with pytest.raises(error, match="line 2 is longer than 1 MiB"):
            read(str(path))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50 << 20


# -- YAML ------------------------------------------------------------------------------------------


def test_recursive_alias_and_deep_nesting_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "strange.yaml"
    path.write_text("a: &a [*a]")
    with pytest.raises(ConfigError, match="recursive aliases are not supported"):
        read_yaml(path)
    path.write_text("a: " + "[" * 20_000 + "]" * 20_000)
    with pytest.raises(ConfigError, match=r"strange\.yaml: the YAML has too many nested levels"):
        read_yaml(path)


def test_yaml_aliases_of_normal_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: &a {lr: 1}\nb: *a\nc: [*a, *a]\n")
    assert read_yaml(path).c[1].lr == 1


# -- archives --------------------------------------------------------------------------------------


def test_zip_bomb_among_recorded_groups_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "step_000002.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        array = io.BytesIO()
        np.save(array, np.zeros(1 << 26, np.uint8))
        archive.writestr("description.npy", array.getvalue())
    assert path.stat().st_size < 100_000

    tracemalloc.start()
    assert GroupStore(tmp_path, keep_checkpoints=2, sampled_with="").load(2) == {}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "description.npy would decompress to 67,108,992 bytes" in caplog.text
    assert peak < 5 << 20


def test_pickle_among_recorded_groups_is_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.savez(tmp_path / "step_000002.npz", description=np.array([Path("a pickle")], dtype=object))
    assert GroupStore(tmp_path, keep_checkpoints=2, sampled_with="").load(2) == {}
    assert "allow_pickle=False" in caplog.text
