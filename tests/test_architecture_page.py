"""The dependency table of docs/architecture.md equals the contract that import-linter checks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def contract_rows() -> list[list[str]]:
    """Return the rows of subpackages of rl_loop in pyproject.toml, the highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (
        contract
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract.get("containers") == ["rl_loop"]
    )
    return [sorted(layer.split(" | ")) for layer in contract["layers"]]


def page_rows() -> list[list[str]]:
    """Return the first column of the table that begins with the column "Subpackages"."""
    page = (ROOT / "docs/architecture.md").read_text()
    (table,) = re.findall(r"^\| Subpackages \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, flags=re.M)
    return [sorted(re.findall(r"`(\w+)`", row.split("|")[1])) for row in table.splitlines()]


def test_dependency_table_equals_import_contract() -> None:
    assert page_rows() == contract_rows()
