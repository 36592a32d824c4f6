"""A run whose driver is killed and resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.rl_loop.tiny_runs import CONFIGS
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[4]


class Driver:
    """A run in a separate process, and all processes that it was seen to start."""

    def __init__(self, program: list[str], arguments: list[str]) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, *program, "rl", str(CONFIGS / "rl/tiny_retool.yaml"), *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started: set[psutil.Process] = set()

    def wait(self) -> int:
        """Wait for the driver's end, and return its status, for signals in the shell's format."""

        def has_ended() -> bool:
            with suppress(psutil.NoSuchProcess):
                self.started |= set(psutil.Process(self.process.pid).children(recursive=True))
            return self.process.poll() is not None

        wait_until(has_ended, pause=0.2)
        return self.process.wait()

    def still_at_work(self) -> list[str]:
        """Return processes of the run that outlive their driver.

        Ray's agents are excluded, because they take time to notice the loss of their node.
        """
        lines = []
        for process in self.started:
            with suppress(psutil.NoSuchProcess):
                line = " ".join(process.cmdline())
                if any(name in line for name in ("Worker", "Trainer", "raylet/raylet", "sandbox")):
                    lines.append(line.strip())
        return lines

    def end_what_is_left(self) -> None:
        for process in self.started:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    @property
    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read()
