"""The wheels in a new environment: commands work from any directory, without a checkout.

The tests run the page for laptops verbatim as a normal user of a clean machine. See
``as_a_new_user``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_SECONDS
from tests.support.wheels import KERNELS, ROOT, build_wheels, pip

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program with an environment that excludes this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=4 * PATIENCE_SECONDS,
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


@dataclass(frozen=True)
class Installed:
    """Environment in which the wheels are installed."""

    programs: Path
    """Its ``bin`` directory."""
    elsewhere: Path
    """An empty directory."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build and install both wheels."""
    root = tmp_path_factory.mktemp("installed")
    wheels = build_wheels(root, KERNELS, ".")
    assert [wheel.name.split("-")[0] for wheel in wheels] == ["gptoss_kernels", "megatron_gptoss"]

    # Packages of this environment provide the dependencies. The wheels' own files come first in
    # sys.path.
    run(sys.executable, "-m", "venv", root / "venv", cwd=root)
    python = root / "venv/bin/python"
    pip("--python", python, "install", "--no-deps", *wheels, cwd=root)
    (site,) = (root / "venv/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")

    empty = root / "elsewhere"
    empty.mkdir()
    for package in ("rl_loop", "gptoss_kernels"):
        program = f"import {package}; print({package}.__file__)"
        place = run(python, "-c", program, cwd=empty).stdout
        assert place.startswith(str(site)), place
    return Installed(root / "venv/bin", empty)


@pytest.fixture
def gptoss(installed: Installed) -> Callable[..., str]:
    """Run the installed command in an empty directory, and return its output."""
    return lambda *words: run(installed.programs / "gptoss", *words, cwd=installed.elsewhere).stdout


def as_a_new_user(script: str, programs: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a bash script as a normal user with an empty home. Nothing outside the home is writable.

    The sandbox is like a container: user 1000, no capabilities, and everything read-only except
    ``home`` and an empty /tmp. It has no variables of the test process except the variables by
    which
    pip finds its index.
    """
    kept = [
        name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")
    ]
    variables = {name: os.environ[name] for name in kept}
    variables |= {"HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    sandbox = ["bwrap", "--unshare-user", "--unshare-pid", "--die-with-parent", "--clearenv"]
    sandbox += [
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--ro-bind",
        "/",
        "/",
        "--dev-bind",
        "/dev",
        "/dev",
    ]
    sandbox += ["--proc", "/proc", "--tmpfs", "/tmp", "--ro-bind", programs.parent, programs.parent]
    sandbox += ["--bind", home, home, "--chdir", home]
    for name, value in variables.items():
        sandbox += ["--setenv", name, value]
    return run(*sandbox, "bash", "-c", f"set -eux\n{script}", cwd=home)


def test_installed_command_prints_its_version(gptoss: Callable[..., str]) -> None:
    assert gptoss("--version").startswith("gptoss 0.")


def test_user_module_named_launch_does_not_hide_ours(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text("raise SystemExit('the wrong launch')\n")
    command = ["env", "PYTHONPATH=.", installed.programs / "gptoss", "plan", "tiny_retool"]
    assert "memory" in run(*command, cwd=tmp_path).stdout


@pytest.mark.parametrize(
    "name", ["gpt-oss-20b_1x8_80gb", "configs/untested/rl/gpt-oss-20b_1x8_80gb.yaml"]
)
def test_installed_command_plans_a_shipped_configuration(
    name: str, gptoss: Callable[..., str]
) -> None:
    assert gptoss("plan", name, "--gpu", "h100").startswith("fits: ")


def test_installed_command_prints_dry_run_for_shipped_cluster(gptoss: Callable[..., str]) -> None:
    printed = gptoss("launch", "gpt-oss-20b_2x8", "--cluster", "slurm", "--dry-run")
    assert "#SBATCH" in printed and "# memory plan" in printed


def test_laptop_page_commands_work_verbatim(installed: Installed, tmp_path: Path) -> None:
    """Run every block of the page except the installation. ``make setup`` also gets the vocabulary.

    Each block runs separately. The time limit therefore applies per block, and a timeout shows the
    commands of its block.
    """
    page = (ROOT / "docs/getting_started/laptop.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", page, flags=re.S | re.M)
    said = [
        ["gptoss 0.", "sandbox"],
        ["step 40/40", "report: runs/first_sft/report.html"],
        [
            "step 3/3  held out",
            "held-out accuracy 0.000 -> 0.000",
            "report: runs/first/report.html",
        ],
        ["runs/first/report.html", "training.steps: 80"],
        ["1470640"],
    ]
    vocabulary = "test $(id -u) = 1000\npython -m rl_loop.harmony.o200k\n"
    as_a_new_user(vocabulary, installed.programs, tmp_path)

    for block, expected in zip(blocks, said, strict=True):
        done = as_a_new_user(block, installed.programs, tmp_path)
        for text in expected:
            assert text in done.stdout, f"{block}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "runs/first/report.html").exists()


def test_new_user_writes_only_to_home(installed: Installed, tmp_path: Path) -> None:
    done = as_a_new_user(f"! touch {ROOT}/here", installed.programs, tmp_path)
    assert "Read-only file system" in done.stderr
    assert not (ROOT / "here").exists()


def test_installed_command_trains_a_shipped_configuration(gptoss: Callable[..., str]) -> None:
    options = ["initial_weights=null", "training.steps=1", "rollout.workers=1"]
    options += ["rollout.tasks_per_step=2", "tasks.held_out_tasks=2"]
    assert "step 1/1" in gptoss("rl", "tiny_retool", *options)
