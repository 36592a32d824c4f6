"""benchmarks/tune_moe.py compiles in processes of its own whatever it times, and says if they fail."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "benchmarks/tune_moe.py"
FAILING_EXIT_CODE = 7


@pytest.fixture
def tune_moe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Make the program this process's main module, which processes that it starts run again."""
    # As Python does for a program.
    monkeypatch.setattr(sys, "path", [str(PROGRAM.parent), *sys.path])
    specification = importlib.util.spec_from_file_location("tune_moe", PROGRAM)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "tune_moe", module)
    specification.loader.exec_module(module)

    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def tell_imports_or_fail(directory: Path, shape: object, share: list[Any]) -> None:
    """In place of ``compile_share``, in a process of its own: write what it has imported and where it would
    find SGLang. The process with the shorter share fails."""
    main = sys.modules["__mp_main__"]
    sglang = importlib.util.find_spec("sglang")
    told = {
        "program": main.__file__,
        "timing": sys.modules["timing"].__file__,
        "sglang": sglang.origin if sglang else None,
        "work": len(share),
    }
    (directory / f"{os.getpid()}.json").write_text(json.dumps(told))
    if len(share) == 1:
        sys.exit(FAILING_EXIT_CODE)


def test_compiling_processes_import_timing_but_not_our_sglang_and_a_failed_one_is_told(
    tune_moe: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tune_moe, "compile_share", partial(tell_imports_or_fail, tmp_path))
    monkeypatch.setattr(tune_moe, "BLOCK_SIZES_M", (128,))
    # Two processes, of which one has one choice and the other two.
    monkeypatch.setattr(tune_moe, "candidates", lambda block_m: [block_m, block_m, block_m])
    tune_moe.compile_all(SimpleNamespace(experts=32), [1024], 2)

    told = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert sorted(process["work"] for process in told) == [1, 2]
    for process in told:
        assert process["program"] == str(PROGRAM)
        assert process["timing"] == str(PROGRAM.with_name("timing.py"))
        assert process["sglang"] != str(PROGRAM.with_name("sglang.py"))

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert f"1 of 2 compiling processes failed (exit codes {FAILING_EXIT_CODE});" in lines[0]


@pytest.mark.parametrize(("experts", "of_sixteen_rows"), [(32, [1, 4, 16]), (128, [1, 4, 48])])
def test_what_is_timed_has_been_compiled(
    tune_moe: ModuleType, experts: int, of_sixteen_rows: list[int]
) -> None:
    def compiled_as(tokens: int, block_m: int) -> tuple[int, bool, bool]:
        """Tell what Triton compiles for: it looks which arguments are divisible by 16."""
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
    # Nothing is compiled that is not timed.
    assert tune_moe.compiled_batches([4096], experts, 16) == []
