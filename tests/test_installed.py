"""A wheel, installed in a fresh environment: commands work from any directory, without a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("kernels", "megatron_gptoss", "converters", "rl_loop", "launch", "configs")
FILES = ("pyproject.toml", "README.md", "LICENSE")

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program that sees nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=2 * PATIENCE_SECONDS,
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def gptoss(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The command of an installed wheel; returns what it prints, in an empty directory."""
    root = tmp_path_factory.mktemp("installed")
    # Built from a copy: setuptools leaves files beside the sources.
    source = root / "source"
    source.mkdir()
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    run(*pip, source, "-w", root / "dist", cwd=root)
    (wheel,) = (root / "dist").glob("*.whl")

    # The dependencies are those of this environment, behind what the wheel brings.
    run(sys.executable, "-m", "venv", root / "venv", cwd=root)
    python = root / "venv/bin/python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        wheel,
        cwd=root,
    )
    (site,) = (root / "venv/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    shutil.rmtree(source)

    empty = root / "elsewhere"
    empty.mkdir()
    place = run(python, "-c", "import rl_loop; print(rl_loop.__file__)", cwd=empty).stdout
    assert place.startswith(str(site)), place
    return lambda *words: run(root / "venv/bin/gptoss", *words, cwd=empty).stdout


def test_the_installed_command_says_its_version(gptoss: Callable[..., str]) -> None:
    assert gptoss("--version").startswith("gptoss 0.")


@pytest.mark.parametrize("name", ["gpt-oss-20b_1x8_80gb", "configs/rl/gpt-oss-20b_1x8_80gb.yaml"])
def test_plans_a_shipped_configuration(name: str, gptoss: Callable[..., str]) -> None:
    assert "memory per H100" in gptoss("plan", name, "--gpu", "h100")


def test_a_dry_run_for_a_shipped_cluster(gptoss: Callable[..., str]) -> None:
    printed = gptoss("launch", "gpt-oss-20b_2x8", "--cluster", "slurm", "--dry-run")
    assert "#SBATCH" in printed and "# memory plan" in printed


def test_trains_a_shipped_configuration(gptoss: Callable[..., str]) -> None:
    options = ["initial_weights=null", "training.steps=1", "rollout.workers=1"]
    options += ["rollout.tasks_per_step=2", "tasks.held_out_tasks=2"]
    assert "step 1/1" in gptoss("rl", "tiny_retool", *options)
