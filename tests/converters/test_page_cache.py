"""A conversion drops pages from the page cache only if it does not read them again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from converters import page_cache, torch_dist
from converters.bits import FileRange
from converters.hf_directory import HfDirectory
from converters.megatron_checkpoint import MegatronCheckpoint
from converters.names import parameter_mappings
from converters.page_cache import StreamedPages
from tests.support.converters.quantized_models import MODEL, quantized_weights, save

Dropped = list[tuple[int, int, int]]
"""(inode, offset, length)"""


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> Dropped:
    """Record every range that the kernel was advised to drop."""
    calls: Dropped = []

    def record(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        calls.append((os.fstat(descriptor).st_ino, offset, length))

    monkeypatch.setattr(os, "posix_fadvise", record)
    return calls


def test_range_is_dropped_at_window_end_and_one_window_later(
    tmp_path: Path, dropped: Dropped
) -> None:
    path = tmp_path / "shard-0"
    path.touch()
    inode = path.stat().st_ino
    with StreamedPages(window_bytes=20) as streamed:
        streamed.add([FileRange(path, 0, 10), FileRange(path, 10, 10)])
        assert not dropped

        path.rename(tmp_path / "model.safetensors")
        streamed.add([FileRange(path, 20, 10)])
        assert dropped == [(inode, 0, 10)]

        streamed.add([FileRange(path, 30, 10), FileRange(path, 40, 10)])
        assert dropped[1:] == [(inode, 10, 10), (inode, 20, 10), (inode, 0, 10)]


@pytest.mark.parametrize("check", ["sample", "all"])
def test_only_pages_without_read_back_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropped: Dropped, check: str
) -> None:
    monkeypatch.setattr(page_cache.host_memory, "total_bytes", lambda: 0)
    monkeypatch.setattr("converters.compared_parameters.next_layer", lambda kind, config: 1)
    source = save(tmp_path / "hf", MODEL, quantized_weights(MODEL))
    monkeypatch.setattr(torch_dist, "check_import", lambda *args: None)
    monkeypatch.setattr(torch_dist, "check_export", lambda *args, **options: None)

    torch_dist.import_checkpoint(source, tmp_path / "megatron", check=check)
    torch_dist.export_checkpoint(
        tmp_path / "megatron", tmp_path / "back", "mxfp4", source, check=check
    )

    expected = set()
    for mapping in parameter_mappings(MODEL).values():
        if check == "all" or mapping.expert is None or mapping.layer == 1:
            continue
        [name] = mapping.hf_names
        ranges = [
            *HfDirectory(source).file_ranges(name, mapping.expert),
            *MegatronCheckpoint(tmp_path / "megatron").file_ranges(mapping),
        ]
        if mapping.expert == 0:  # an export writes all experts of a tensor at once
            ranges += HfDirectory(tmp_path / "back").file_ranges(name)
        expected |= {(r.path.stat().st_ino, r.offset, r.length) for r in ranges}
    assert set(dropped) == expected
