"""Busy loops that reveal timing assumptions of tests: ``make test-busy`` (GPTOSS_TEST_LOAD=2)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rl_loop.cluster.placement import exit_with_parent
from tests.support.leftover_processes import RUN

LOAD = "GPTOSS_TEST_LOAD"
LOOPS_KEY = pytest.StashKey[list[subprocess.Popen[bytes]]]()


def start_busy_loops(count: int) -> list[subprocess.Popen[bytes]]:
    """Start processes that use a core each, until they are killed or this process ends."""
    environment = {name: value for name, value in os.environ.items() if name != RUN}
    command = [sys.executable, "-S", "-c", "while True: pass"]
    return [
        subprocess.Popen(command, env=environment, preexec_fn=exit_with_parent)
        for _ in range(count)
    ]


def stop_busy_loops(loops: list[subprocess.Popen[bytes]]) -> None:
    for loop in loops:
        loop.kill()
        loop.wait()


def pytest_sessionstart(session: pytest.Session) -> None:
    count = int(os.environ.get(LOAD, "0"))
    if count and not hasattr(session.config, "workerinput"):
        session.config.stash[LOOPS_KEY] = start_busy_loops(count)


def pytest_unconfigure(config: pytest.Config) -> None:
    stop_busy_loops(config.stash.get(LOOPS_KEY, []))
