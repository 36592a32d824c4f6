"""``gptoss rl`` in an interactive allocation (``salloc``), as docs/getting_started/slurm.md shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_loop.tracking.run_directory import RunDirectory
from tests.support.slurm.lab import ROOT, SMALL, Lab, steps_done

pytestmark = pytest.mark.slurm


@contextmanager
def allocated(lab: Lab, folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Run a long ``gptoss rl`` on a node of an allocation."""
    command = [sys.executable, "-m", "launch", "rl", str(ROOT / "configs/rl/tiny_retool.yaml")]
    overrides = [*SMALL, "parallel.world_size=1", "rollout.workers=1", "training.steps=1000"]
    allocation = ["salloc", "--nodes=1", "--cpus-per-task=4", "--time=30", "srun"]
    running = subprocess.Popen(
        [*allocation, *command, "name=interactive", *overrides, *more],
        cwd=folder,
        env={**lab.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield running
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize(("signal", "status"), [("USR1", 130), ("TERM", 143)])
def test_signal_of_slurm_saves_a_run(lab: Lab, tmp_path: Path, signal: str, status: int) -> None:
    """Slurm signals Ray's daemons and the trainer, too. USR1 is that of ``salloc --signal``."""
    run = RunDirectory(tmp_path / "runs/interactive")
    saved = 0
    for attempt in ([], ["--resume"]):
        with allocated(lab, tmp_path, *attempt) as running:
            lab.until(
                lambda before=saved, process=running: (  # type: ignore[misc]
                    steps_done(run) > before or process.poll() is not None
                ),
                "a training step",
                seconds=400,
            )
            (job,) = lab.cluster.run("squeue", "-h", "-o", "%i").split()
            lab.cluster.run("scancel", f"--signal={signal}", job)
            output, _ = running.communicate(timeout=300)
        found = re.search(r"saved after step (\d+) of 1000", output)
        assert found is not None, output
        assert f"Exited with exit code {status}" in output
        assert int(found[1]) > saved
        saved = int(found[1])
        lab.until(lambda: not lab.queue(), "the end of the allocation", seconds=30)
