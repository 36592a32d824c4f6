"""Code that renames a file syncs its contents to the disk first, or states why this is unnecessary.

Otherwise, a power failure could leave the name of an empty or truncated file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("kernels", "megatron_gptoss", "converters", "rl_loop", "launch")
SYNCING = {"fsync", "syncfs", "sync_directory", "sync_names", "write_atomically", "atomic_file"}
NOT_NEEDED = {
    "kernels/gptoss_kernels/mxfp4/cpu.py:_build": "a library that is cut short does not load",
    "converters/hf_shards.py:finish": "in a directory that is synced before it gets its name",
    "megatron_gptoss/new_directory.py:restore": "the directory has been on the disk before",
    "rl_loop/rollout/group_store.py:release": "the file has been on the disk before",
    "rl_loop/rollout/group_store.py:load": "the file has been on the disk before",
}


def called(function: ast.AST) -> set[str]:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {
        call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls
    }


def renaming(source: str) -> Iterator[tuple[str, set[str]]]:
    """Yield functions that rename files, each with the names of the functions that it calls."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = called(node)
            of_os = "os.replace" in ast.unparse(node) or "shutil.move" in ast.unparse(node)
            if of_os or names & {"rename", "renames"}:
                yield node.name, names


def test_contents_are_synced_before_a_rename() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{name}": names
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for name, names in renaming(path.read_text())
    }
    assert "megatron_gptoss/new_directory.py:publish" in found
    unsafe = {place for place, names in found.items() if not names & SYNCING}
    assert unsafe == set(NOT_NEEDED)


def test_rename_without_sync_is_detected() -> None:
    [(name, names)] = renaming("def publish(a, b):\n    a.write_text('x')\n    a.rename(b)\n")
    assert name == "publish" and not names & SYNCING
