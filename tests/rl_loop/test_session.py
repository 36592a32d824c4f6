"""A run closes everything that it started, and few modules use the whole configuration."""

from __future__ import annotations

import ast
import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.run import RunInterrupted, run_rl
from rl_loop.tracking.run_directory import read_json_lines
from rl_loop.tracking.run_lock import locked_run
from tests.support.forked_workers import forking_workers
from tests.support.leftover_processes import RUN, leftovers
from tests.support.rl_loop.tiny_runs import RL, Quiet
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


def fail(step: int) -> None:
    raise RuntimeError("the display is broken")


def press_ctrl_c(step: int) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def stop_at_once(step: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("on_step", "ending"),
    [
        pytest.param(lambda step: None, nullcontext(), id="success"),
        pytest.param(
            fail,
            pytest.raises(RuntimeError, match="the display is broken"),
            id="error",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            press_ctrl_c,
            pytest.raises(RunInterrupted, match="saved after step 1 of 2"),
            id="interrupt",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            stop_at_once,
            pytest.raises(RunInterrupted, match="stopped at once"),
            id="second interrupt",
        ),
    ],
)
def test_run_leaves_no_process_thread_or_signal_handler(
    on_step: Callable[[int], None], ending: Any, tmp_path: Path
) -> None:
    options = ["training.steps=2", "tasks.held_out_tasks=1", f"output_dir={tmp_path}"]
    config = load_config(ROOT / "configs/rl/tiny_retool.yaml", RlConfig, [*RL, *options])
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = set(threading.enumerate())
    processes = {leftover.pid for leftover in leftovers(os.environ[RUN], allow_helpers=True)}

    with forking_workers(), ending:
        run_rl(config, Quiet(on_step))

    def processes_left() -> list[Any]:
        found = leftovers(os.environ[RUN], allow_helpers=True)
        return [leftover for leftover in found if leftover.pid not in processes]

    wait_until(lambda: not processes_left())
    assert not ray.is_initialized()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    ours = [
        thread.name for thread in set(threading.enumerate()) - threads if "rollouts" in thread.name
    ]
    assert ours == []
    with locked_run(config.directory):
        assert len(read_json_lines(config.directory / "metrics.jsonl")) >= 1
    assert not list((config.directory / "checkpoints").glob("*.partial"))


PRODUCT = ("kernels/gptoss_kernels", "megatron_gptoss", "converters", "rl_loop", "launch")
MODULES_THAT_KNOW_A_WHOLE_CONFIGURATION = {
    "launch/cli/tinker.py",
    "launch/cli/training.py",
    "launch/config_list.py",
    "launch/plan.py",
    "launch/rollout_plan.py",
    "launch/submit.py",
    "rl_loop/config/load.py",
    "rl_loop/config/served.py",
    "rl_loop/evaluation/policy_evaluation.py",
    "rl_loop/lifecycle/disk_checks.py",
    "rl_loop/lifecycle/resume.py",
    "rl_loop/lifecycle/start_checks.py",
    "rl_loop/lifecycle/vocabulary_checks.py",
    "rl_loop/lifecycle/weight_checks.py",
    "rl_loop/loop.py",
    "rl_loop/play/episode.py",
    "rl_loop/run.py",
    "rl_loop/run_parts.py",
    "rl_loop/session.py",
    "rl_loop/tinker/serve.py",
}
"""All other modules receive the sections that they need."""
DEFINITIONS = ("rl_loop.config.every_run.", "rl_loop.config.run.", "rl_loop.config.tinker.")
"""Modules that define whole configurations, each with a dot."""
WHOLE_CONFIGURATIONS = {"RunConfig", "RlConfig", "SftConfig", "TinkerConfig"}


def knows_a_whole_configuration(source: str) -> bool:
    """Return True if a module imports or names a type of whole configurations."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        for name in names:
            if f"{name}.".startswith(DEFINITIONS):
                return True
            if name.rpartition(".")[2] in WHOLE_CONFIGURATIONS:
                return True
    return False


def test_few_modules_use_a_whole_configuration() -> None:
    files = [file for package in PRODUCT for file in sorted((ROOT / package).rglob("*.py"))]
    definitions = {ROOT / f"{name[:-1].replace('.', '/')}.py" for name in DEFINITIONS}
    assert definitions < set(files)
    knowing = {
        str(file.relative_to(ROOT))
        for file in files
        if file not in definitions and knows_a_whole_configuration(file.read_text())
    }
    assert knowing == MODULES_THAT_KNOW_A_WHOLE_CONFIGURATION


@pytest.mark.parametrize(
    "source",
    [
        "from rl_loop.config.run import check_reward_parts",
        "from rl_loop.config import run",
        "import rl_loop.config.run as run",
        "from rl_loop.config.load import RlConfig",
        "from rl_loop.config import load\nkind = load.SftConfig",
        "def later():\n    from rl_loop.config.every_run import RunConfig",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rl_loop.session import RunConfig",
    ],
)
def test_every_import_of_a_whole_configuration_is_found(source: str) -> None:
    assert knows_a_whole_configuration(source)


@pytest.mark.parametrize(
    "source",
    [
        "from rl_loop.config.rollout import RolloutConfig",
        "from rl_loop.config.load import load_run_config",
        "from rl_loop.run import run_rl",
    ],
)
def test_section_or_loader_does_not_count_as_whole_configuration(source: str) -> None:
    assert not knows_a_whole_configuration(source)
