"""docs/environments.md does what it says: its code is taken from there and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with the guide's files, as a newcomer would write them."""
    guide = (ROOT / "docs/environments.md").read_text()
    blocks = re.findall(r"```\w+ (\S+)\n(.*?)```", guide, flags=re.S)
    assert [name for name, _ in blocks] == ["guessing.py", "test_guessing.py", "guessing.yaml"]
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name, code in blocks:
        (tmp_path / "configs/rl" / name if name.endswith("yaml") else tmp_path / name).write_text(code)
    return tmp_path


def run(workplace: Path, *arguments: str) -> str:
    paths = os.pathsep.join([str(workplace), str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=workplace, env=environment, text=True, capture_output=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_guides_environment_is_forty_lines_and_passes_its_test(workplace: Path) -> None:
    lines = [line for line in (workplace / "guessing.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 45
    assert "2 passed" in run(workplace, "-m", "pytest", "-q", "test_guessing.py", "-p", "no:cacheprovider")


def test_the_guides_environment_trains(workplace: Path) -> None:
    command = ["-c", "from launch.cli import main; main()", "rl", "configs/rl/guessing.yaml"]
    small = ["training.steps=1", "tasks.held_out_tasks=2", "rollout.tasks_per_step=2"]
    assert "report: runs/guessing/report.html" in run(workplace, *command, *small).replace("\n", "")
    assert (workplace / "runs/guessing/metrics.jsonl").read_text().count("\n") == 2
