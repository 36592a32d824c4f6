"""Runs stopped by a terminal: Ctrl-C once and twice, SIGTERM to the group, a closed terminal."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from rl_loop.tracking.run_directory import read_training_steps
from tests.support.forked_workers import python_with_forks
from tests.support.launch.terminal import Terminal

ROOT = Path(__file__).parents[2]
TINY = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.head_size=16",
]
SFT = ["sft", "configs/sft/tiny_retool.yaml", *TINY, "sequences_per_step=16"]
RL = [
    "rl",
    "configs/rl/tiny_retool.yaml",
    *TINY,
    "initial_weights=null",
    "rollout.workers=1",
    "rollout.tasks_per_step=2",
    "rollout.samples_per_task=2",
    "rollout.max_sampled_tokens_per_turn=32",
    "tasks.held_out_tasks=2",
    "evaluate_every=1000",
]
START_SECONDS = 240
"""Time limit in seconds for imports, Ray and a trainer on a busy machine."""


def start(kind: str, saved: bool, output: Path) -> Terminal:
    """Start a run of 100,000 steps. ``saved``: with a checkpoint after every step, not only at its stop."""
    options = [f"output_dir={output}", "name=stopped", "training.steps=100000"]
    options += [f"training.checkpoint_every={1 if saved else 100000}"]
    command = [*python_with_forks(), "-m", "launch", *{"sft": SFT, "rl": RL}[kind], *options]
    return Terminal(command, ROOT, OMP_NUM_THREADS="1")


def wait_for_steps(terminal: Terminal, count: int) -> None:
    terminal.wait_for(rf"step {count}/100000", START_SECONDS)


SLOW = pytest.mark.slow
# One case is not slow. The last tests press Ctrl-C. tests/rl_loop/test_session.py tests a second
# interrupt without a new process, tests/rl_loop/test_sft_on_conversations.py an interrupt of SFT
# before its first checkpoint. The fault-injection test ends a run by SIGTERM.
CASES = [
    ("rl", True, "HUP", ()),
    ("sft", False, "HUP", SLOW),
    ("sft", True, "TERM", SLOW),
    ("rl", True, "INT", SLOW),
    ("rl", False, "INT twice", SLOW),
    ("sft", False, "INT", SLOW),
    ("sft", False, "INT twice", SLOW),
    ("sft", False, "TERM", SLOW),
    ("sft", True, "INT", SLOW),
    ("sft", True, "INT twice", SLOW),
    ("sft", True, "HUP", SLOW),
    ("rl", True, "INT twice", SLOW),
    ("rl", True, "TERM", SLOW),
    ("rl", False, "INT", SLOW),
    ("rl", False, "TERM", SLOW),
    ("rl", False, "HUP", SLOW),
]


def build_name(kind: str, saved: bool, how: str) -> str:
    return f"{kind}-{'after' if saved else 'before'}-the-first-checkpoint-{how.replace(' ', '-')}"


@pytest.mark.parametrize(
    ("kind", "saved", "how"),
    [pytest.param(*case, id=build_name(*case), marks=marks) for *case, marks in CASES],
)
def test_stopped_run_reports_saved_state_and_leaves_no_process(
    kind: str, saved: bool, how: str, tmp_path: Path
) -> None:
    run = tmp_path / "stopped"
    with start(kind, saved, tmp_path) as terminal:
        # The first checkpoint is complete when the second one begins.
        wait_for_steps(terminal, 3 if saved else 1)

        if how.startswith("INT"):
            terminal.press_ctrl_c()
        elif how == "TERM":
            terminal.signal_group(signal.SIGTERM)
        else:
            terminal.hang_up()

        if how == "INT twice":
            terminal.wait_for("press Ctrl-C again to stop at once|saved after", 30)
            terminal.press_ctrl_c()
        status = terminal.wait(120)
        left = terminal.processes_left()

    assert status == 128 + getattr(signal, f"SIG{how[:4].strip()}")
    assert left == []
    said = terminal.said if how != "HUP" else (run / "output.log").read_text()
    assert "Traceback" not in said
    assert f"to continue: gptoss {kind} configs/" in said
    assert "--resume" in said.splitlines()[-1]

    steps = len(read_training_steps(run / "metrics.jsonl"))
    checkpoints = run / "checkpoints"
    assert not list(checkpoints.glob("*.partial"))
    if how == "INT twice" and "stopped at once" in said:
        known = (
            r"newest checkpoint after step \d+ of 100000"
            if saved
            else "so --resume starts with step 1"
        )
        assert re.search(rf"stopped at once; \S+ .*{known}", said)
        return

    assert f"saved after step {steps} of 100000 in {run}" in said
    assert (checkpoints / "latest").read_text() == f"step_{steps:06d}"


def test_a_run_that_is_stopped_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    with start("rl", False, tmp_path) as terminal:
        terminal.wait_for("loading the policy", START_SECONDS)
        terminal.press_ctrl_c()
        status = terminal.wait(60)
        left = terminal.processes_left()
    assert status == 130
    assert left == []
    assert "stopped at once; the run had not started, and nothing was written" in terminal.said
    assert "Traceback" not in terminal.said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # Ray itself ends its daemons, but here they are in a separate session
def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    with start("rl", False, tmp_path) as terminal:
        wait_for_steps(terminal, 2)
        terminal.process.kill()
        terminal.wait(30)
        # After the death of their daemon, Ray's agents try to contact a server for up to one
        # minute.
        assert terminal.processes_left(seconds=90) == []
