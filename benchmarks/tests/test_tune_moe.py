"""Processes of ``benchmarks.experts tune`` compile all timed settings and report failures."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.experts import tuning as tune_moe

FAILING_EXIT_CODE = 7


def record_work_or_fail(directory: Path, shape: object, share: list[Any]) -> None:
    """Replace ``compile_share``: write the size of the share. The shorter share fails."""
    (directory / f"{os.getpid()}.json").write_text(json.dumps(len(share)))
    if len(share) == 1:
        sys.exit(FAILING_EXIT_CODE)


def test_compile_all_reports_failed_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune_moe, "compile_share", partial(record_work_or_fail, tmp_path))
    # Processes with CUDA cannot be forks. Here forks save the imports.
    forks = multiprocessing.get_context("fork")
    monkeypatch.setattr(tune_moe.multiprocessing, "get_context", lambda kind: forks)
    monkeypatch.setattr(tune_moe, "BLOCK_SIZES_M", (128,))
    # Two processes: one has one choice, and the other has two.
    monkeypatch.setattr(tune_moe, "candidates", lambda block_m: [block_m, block_m, block_m])
    tune_moe.compile_all(SimpleNamespace(experts=32), [1024], 2)

    assert sorted(json.loads(file.read_text()) for file in tmp_path.glob("*.json")) == [1, 2]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert f"1 of 2 compiling processes failed (exit codes {FAILING_EXIT_CODE});" in lines[0]


@pytest.mark.parametrize(("experts", "of_sixteen_rows"), [(32, [1, 4, 16]), (128, [1, 4, 48])])
def test_timed_settings_are_compiled_before(experts: int, of_sixteen_rows: list[int]) -> None:
    def compiled_as(tokens: int, block_m: int) -> tuple[int, bool, bool]:
        """Return the key of Triton's compilation, which depends on the divisibility by 16."""
        entries = tokens * 4
        padded = entries * block_m
        if entries > experts:
            padded = entries + (experts + 1) * (block_m - 1)
        return block_m, entries % 16 == 0, padded % 16 == 0

    batches = {
        block_m: tune_moe.compiled_batches(tune_moe.TOKENS, experts, block_m)
        for block_m in tune_moe.BLOCK_SIZES_M
    }
    compiled = {
        compiled_as(tokens, block_m) for block_m, counts in batches.items() for tokens in counts
    }
    timed = {
        compiled_as(tokens, block_m)
        for tokens in tune_moe.TOKENS
        for block_m in tune_moe.block_sizes(tokens, experts)
    }
    assert compiled == timed
    assert batches[16] == of_sixteen_rows
    # Only timed settings are compiled.
    assert tune_moe.compiled_batches([4096], experts, 16) == []
