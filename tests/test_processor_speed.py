"""Limits of processor time follow the speed of the machine."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support import processor_speed

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CLOCKS = {"process_time", "thread_time", "children_user", "children_system"}


def test_slowness_is_the_ratio_of_the_fastest_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = processor_speed.SECONDS_OF_SAMPLE
    samples = iter([9 * stated, 3 * stated, 2 * stated, 8 * stated, 5 * stated])
    monkeypatch.setattr(processor_speed, "_sample", lambda: next(samples))
    assert processor_speed.slowness() == pytest.approx(2)


def test_fast_machine_has_the_limits_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_speed, "_sample", lambda: processor_speed.SECONDS_OF_SAMPLE / 3)
    assert processor_speed.slowness() == 1


def fixed_limits(source: str) -> list[int]:
    """Return the lines that compare processor time with a number.

    A variable counts as processor time if a function computes it from a clock or from such a variable, without
    ``slowness()``.
    """
    module = ast.parse(source)
    functions = [node for node in ast.walk(module) if isinstance(node, FUNCTIONS)]
    found = {line for scope in [module, *functions] for line in _limits_in(scope)}
    return sorted(found)


def _limits_in(scope: ast.AST) -> list[int]:
    """Return the lines of ``fixed_limits`` in one function or in a module."""
    measured: set[str] = set()

    def is_measured(node: ast.AST) -> bool:
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        attributes = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
        return bool(attributes & CLOCKS or names & measured) and "slowness" not in names

    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and is_measured(node.value):
            measured |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return [
        node.lineno
        for node in ast.walk(scope)
        if isinstance(node, ast.Compare)
        and is_measured(node)
        and any(isinstance(side, ast.Constant) for side in [node.left, *node.comparators])
    ]


def test_fixed_limit_of_processor_time_is_found() -> None:
    assert fixed_limits("assert time.process_time() - began < 5") == [1]
    assert fixed_limits("assert os.times().children_user - began < 5") == [1]
    assert fixed_limits("user = os.times().children_user - began\nassert user + 1 < 5") == [2]
    assert fixed_limits("assert time.process_time() - began < 5 * slowness()") == []


@pytest.mark.parametrize("directory", ["tests", "benchmarks/tests"])
def test_limits_of_processor_time_follow_the_machine(directory: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sorted((ROOT / directory).rglob("*.py"))
        for line in fixed_limits(file.read_text(encoding="utf-8"))
    ]
    assert found == []
