"""The table of retries in docs/reliability.md has the values of the constants that it names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs/reliability.md"


def rows() -> list[tuple[str, str]]:
    """Return limit and constant of every row."""
    section = PAGE.read_text().partition("\n## Retries\n")[2].partition("\n## ")[0]
    _, _, *lines = re.findall(r"^\|.*", section, flags=re.M)
    return [(line.split("|")[2].strip(), line.split("|")[3].strip(" `")) for line in lines]


@pytest.mark.parametrize(("limit", "constant"), rows())
def test_retries_table_equals_constants(limit: str, constant: str) -> None:
    module, name = constant.split(":")
    value = getattr(importlib.import_module(f"rl_loop.{module}"), name)
    expected = list(value) if isinstance(value, tuple) else [value]
    assert [float(number) for number in limit.removeprefix("delays ").split(",")] == expected
