"""Error messages end without a period, as CONTRIBUTING.md says."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "megatron_gptoss", "converters", "rl_loop", "launch")


def messages_with_a_period(source: str) -> list[int]:
    """Return the last lines of raised messages that end with a period, but not with an ellipsis."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        for argument in node.exc.args:
            end = argument.values[-1] if isinstance(argument, ast.JoinedStr) else argument
            text = end.value if isinstance(end, ast.Constant) else None
            if isinstance(text, str) and text.endswith(".") and not text.endswith(".."):
                found.append(argument.end_lineno or 0)
    return found


def test_a_final_period_is_found() -> None:
    assert messages_with_a_period('raise ValueError("key: wrong. Correct it.")') == [1]
    assert messages_with_a_period('raise ValueError(f"{key}: wrong.")') == [1]
    assert messages_with_a_period('raise ValueError(f"{key}: wrong. Set it")') == []


def test_error_messages_end_without_a_period() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        for line in messages_with_a_period(file.read_text(encoding="utf-8"))
    ]
    assert found == []
