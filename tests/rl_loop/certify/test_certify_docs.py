"""docs/certify.md: its example runs, and every check and fault is in its tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl_loop.certify.checks import CHECKS, FORWARD
from rl_loop.certify.implementation import ModelImplementation
from tests.support.rl_loop.certify.prepared import Prepared, failed

PAGE = Path(__file__).parents[3] / "docs/certify.md"


def test_the_adapter_of_the_page_is_certified(prepared: Prepared) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)
    names: dict[str, type[ModelImplementation]] = {}
    exec(example, names)
    implementation = names["MyTrainer"](prepared.first.directory, "fp32")
    results = prepared.run_checks(implementation, "sinks", "gradients", "update")
    assert not failed(results)
    assert results["gradients"].status == "passed"
    assert results["update"].status == "skipped"


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_is_in_the_tables(name: str) -> None:
    assert f"| `{name}` |" in PAGE.read_text()


def test_every_fault_is_in_the_table_with_its_source() -> None:
    text = PAGE.read_text()
    for check in FORWARD:
        for fault in check.faults:
            assert f"| `{check.name}` | {fault.name} |" in text
            assert all(
                source in text for source in re.findall(r"[\w.-]+/[\w.-]+#\d+", fault.source)
            )
