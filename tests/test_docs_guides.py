"""Numbers in the guides' tables are those of the shipped configurations and of ``gptoss plan``."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.cli import app
from rl_loop.config.load import load_run_config

ROOT = Path(__file__).resolve().parents[1]
HYPERPARAMETERS = (ROOT / "docs/hyperparameters.md").read_text()


def table_rows(page: str, head: str) -> list[list[str]]:
    """Return the cells of the table whose first head cell begins with ``head``."""
    lines = page.partition(f"| {head}")[2].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.lstrip().startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return rows


def test_hyperparameters_page_has_values_of_configurations() -> None:
    rows = table_rows(HYPERPARAMETERS, "Configuration")
    assert len(rows) == 6
    for name, _, lr, batch, max_tokens, _ in rows:
        config = load_run_config(ROOT / f"configs/rl/{name.strip('`')}.yaml", "rl", None)
        assert config.optimizer.lr == float(lr)
        assert batch == f"{config.rollout.tasks_per_step} x {config.rollout.samples_per_task}"
        assert config.rollout.max_tokens == int(max_tokens.replace(",", ""))


@cache
def predicted_step(override: str) -> list[str]:
    """Return episodes, step, rollout and update in s, and tokens/s/GPU as printed by ``plan``."""
    path = str(ROOT / "configs/rl/gpt-oss-20b_1x4.yaml")
    done = CliRunner().invoke(app, ["plan", path, "--gpu", "h200", override])
    assert done.exit_code == 0, done.output
    line = done.output.strip().splitlines()[-1]
    number = r"([\d.]+)"
    pattern = (
        rf"with {number} episodes .*: {number} s, of which the rollout takes {number} s"
        rf" and the update {number} s, {number} tokens/s/GPU"
    )
    found = re.search(pattern, line)
    assert found is not None, line
    return list(found.groups())


@pytest.mark.parametrize(
    ("key", "columns"),
    [("tasks_per_step", slice(0, None)), ("max_tokens", slice(1, None))],
)
def test_hyperparameters_page_has_predictions_of_plan(key: str, columns: slice) -> None:
    head = {"tasks_per_step": "`tasks_per_step`", "max_tokens": "`rollout.max_tokens` | Step"}[key]
    rows = table_rows(HYPERPARAMETERS, head)
    assert len(rows) >= 3
    for value, *shown in rows:
        predicted = predicted_step(f"rollout.{key}={value.replace(',', '')}")
        assert [cell.replace(",", "") for cell in shown] == predicted[columns]
