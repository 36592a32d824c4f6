"""Numbers in the guides' tables are those of the shipped configurations and of ``gptoss plan``."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
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
        assert config.rollout.max_episode_tokens == int(max_tokens.replace(",", ""))


def plan(name: str, *words: str) -> list[str]:
    """Return the lines that ``gptoss plan`` prints for a shipped configuration that fits."""
    done = CliRunner().invoke(app, ["plan", str(ROOT / f"configs/{name}.yaml"), *words])
    assert done.exit_code == 0, done.output
    return done.output.strip().splitlines()


@cache
def predicted_step(name: str, gpu: str, *overrides: str) -> list[str]:
    """Return episodes, step, rollout and update in s, and tokens/s/GPU as printed by ``plan``."""
    line = plan(name, "--gpu", gpu, *overrides)[-1]
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
    [("tasks_per_step", slice(0, None)), ("max_episode_tokens", slice(1, None))],
)
def test_hyperparameters_page_has_predictions_of_plan(key: str, columns: slice) -> None:
    head = {
        "tasks_per_step": "`tasks_per_step`",
        "max_episode_tokens": "`rollout.max_episode_tokens` | Step",
    }[key]
    rows = table_rows(HYPERPARAMETERS, head)
    assert len(rows) >= 3
    for value, *shown in rows:
        override = f"rollout.{key}={value.replace(',', '')}"
        predicted = predicted_step("rl/gpt-oss-20b_1x4", "h200", override)
        assert [cell.replace(",", "") for cell in shown] == predicted[columns]


def test_performance_page_has_predicted_memory() -> None:
    rows = table_rows((ROOT / "docs/performance.md").read_text(), "Model, method")
    assert len(rows) == 13
    for method, configuration, gpus, memory, *_ in rows:
        name = configuration.strip("`")
        count, kind = gpus.split()
        is_sft = "SFT" in method
        first = plan(name, "--gpu", kind.lower(), *(["--sft"] if is_sft else []))[0]
        assert f"needs {memory} GB of a GPU's" in first

        config = load_run_config(ROOT / f"configs/{name}.yaml", "sft" if is_sft else "rl", None)
        used = config.parallel.world_size
        if not is_sft and not config.rollout.engine.colocated:
            used += config.rollout.engine.servers * config.rollout.engine.tensor_parallel
        assert used == int(count)


def test_performance_page_has_predicted_costs() -> None:
    rows = table_rows((ROOT / "docs/performance.md").read_text(), "RL configuration in")
    assert len(rows) == 8
    for configuration, gpus, *shown in rows:
        name = configuration.strip("`")
        count, kind = gpus.split()
        episodes, seconds, *_ = predicted_step(name, kind.lower())
        steps = load_run_config(ROOT / f"configs/{name}.yaml", "rl", None).training.steps
        hours = int(count) * float(seconds) / 3600
        per_thousand = 1000 * hours / int(episodes)
        expected = [str(steps), episodes, seconds, f"{steps * hours:.1f}", f"{per_thousand:.2f}"]
        assert shown == expected, name


def test_citation_has_version_and_license_of_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for citation_key, key in {"title": "name", "version": "version", "license": "license"}.items():
        assert citation[citation_key] == project[key]


def test_address_of_repository_is_equal_everywhere() -> None:
    """All places of CONTRIBUTING.md have one address, or the placeholder REPOSITORY."""
    projects = [
        tomllib.loads((ROOT / name / "pyproject.toml").read_text()) for name in ("", "kernels")
    ]
    addresses = [project["project"].get("urls", {}).get("Repository") for project in projects]
    addresses += [yaml.safe_load((ROOT / "CITATION.cff").read_text()).get("repository-code")]
    cloned = [
        address
        for page in (ROOT / "docs").rglob("*.md")
        for address in re.findall(r"git clone (\S+)", page.read_text())
    ]
    assert len(cloned) == 2
    assert {address or "REPOSITORY" for address in addresses} == set(cloned)


@pytest.mark.parametrize(
    ("head", "results"),
    [
        ("Metric | GPT-OSS architecture", "dense_models.md"),
        ("Metric | Correct", "ablations.md"),
    ],
)
def test_hyperparameters_page_quotes_results(head: str, results: str) -> None:
    page = (ROOT / "docs/performance" / results).read_text()
    rows = table_rows(HYPERPARAMETERS, head)
    numbers = [number for _, *cells in rows for cell in cells for number in cell.split(", ")]
    assert len(numbers) >= 10
    for number in set(numbers) - {"-"}:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]|e-)", page), number


def test_one_gpu_guide_quotes_results() -> None:
    guide = (ROOT / "docs/getting_started/one_gpu.md").read_text()
    loop = (ROOT / "docs/performance/loop.md").read_text()
    columns = {"1 H100": 1, "1 H200": 2}
    rows = table_rows(guide, "Value | 1 H100")[:5]
    for gpu, column in columns.items():
        (recorded,) = re.findall(rf"^\| 20B adapters, {gpu}.*$", loop, flags=re.M)[:1]
        assert all(f"| {row[column]} |" in recorded for row in rows), gpu


def test_planning_note_shows_what_plan_prints() -> None:
    note = (ROOT / "docs/design/planning.md").read_text().partition("## Worked example")[2]
    shown = note.split("```\n")[1].strip("\n").splitlines()
    assert len(shown) >= 10
    printed = [line.strip() for line in plan("rl/gpt-oss-20b_1x4", "--gpu", "h200")]
    assert [line for line in shown if line.strip() not in printed] == []
