"""Test files import the product and tests/support, but no other test file, conftest or benchmark."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCHMARK_TESTS = sorted((ROOT / "benchmarks/tests").rglob("*.py"))


def imported_modules(source: str) -> Iterator[str]:
    """Yield every imported module, including imports in functions and in program texts.

    ``from a import b`` yields ``a`` and ``a.b``, because ``b`` may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # The string may be a program for another process, or MODULE:NAME of a configuration.
            yield from (
                word.partition(":")[0].strip("\"'`,;()")
                for word in node.value.split()
                if word.startswith(("tests.", "benchmarks."))
            )


def forbidden_imports(source: str, benchmarks_too: bool = True) -> set[str]:
    """Return the imported test files, conftests and benchmarks."""
    found = set()
    for module in imported_modules(source):
        parts = module.split(".")
        if parts[0] not in ("tests", "benchmarks"):
            continue
        is_test = any(part == "conftest" or part.startswith("test_") for part in parts)
        if is_test or (benchmarks_too and parts[0] == "benchmarks"):
            found.add(module)
    return found


RUN_AS_PROGRAMS = {"tests/rl_loop/certify/test_implementations.py": {"benchmarks.sglang"}}
"""Benchmarks that a test of the product starts as a process."""


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_test_file_imports_no_test_and_no_benchmark(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    if path == Path(__file__):
        return
    assert forbidden_imports(path.read_text()) - RUN_AS_PROGRAMS.get(name, set()) == set()


@pytest.mark.parametrize("path", BENCHMARK_TESTS, ids=lambda path: path.name)
def test_benchmark_test_imports_no_test(path: Path) -> None:
    assert forbidden_imports(path.read_text(), benchmarks_too=False) == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from tests.rl_loop.test_session import helper", "tests.rl_loop.test_session"),
        ("from tests.rl_loop import test_session", "tests.rl_loop.test_session"),
        ("import tests.rl_loop.conftest", "tests.rl_loop.conftest"),
        ("def f():\n    from benchmarks.train.cases import main", "benchmarks.train.cases"),
        ("P = '''\nfrom tests.test_docs import PAGES\n'''", "tests.test_docs"),
        ("E = 'benchmarks.slow_tools:SlowReTool'", "benchmarks.slow_tools"),
    ],
)
def test_forbidden_imports_finds_every_spelling(source: str, found: str) -> None:
    assert found in forbidden_imports(source)


def test_forbidden_imports_allows_support() -> None:
    assert forbidden_imports("from tests.support.waiting import wait_until") == set()


def test_support_modules_hold_no_tests() -> None:
    for path in (ROOT / "tests/support").rglob("*.py"):
        names = {node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")}
        assert not any(name.startswith("test_") for name in names), path
