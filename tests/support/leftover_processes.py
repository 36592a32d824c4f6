"""A pytest plugin that finds processes left behind by tests.

At the end of the session it reports the processes and the tests that started them, ends them, and
fails the run. If pytest is killed, a separate program ends them (``end_with_pytest``).

Child processes inherit the environment. A variable there identifies processes of this run, even if
their parent has ended. The variable PYTEST_CURRENT_TEST of pytest names the test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.end_with_pytest import RUN

GRACE_SECONDS = 20.0
"""Time in seconds for processes that are ending, such as those of Ray after ``ray.shutdown``."""

START_SECONDS = 5.0
"""Maximum time in seconds from a fork to the first instruction of the new program."""

KTHREADD = 2
"""Process id of the parent of kernel threads, which have no command line either."""

END_WITH_PARENT = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "multiprocessing.spawn",  # Megatron's checkpoint writer, which waits for the next checkpoint
    "torch_shm_manager",
    "rl_loop.forked_server",  # one for all checked answers of a process
    "forked_workers/server.py",
    "plugin_server.py",
)
"""Helpers that end with the process that started them, so they are checked by another process."""


@dataclass(frozen=True)
class Leftover:
    """A process that outlived the session."""

    pid: int
    command: str
    test: str

    def __str__(self) -> str:
        return f"process {self.pid} of {self.test}: {self.command}"


def leftovers(run: str, allow_helpers: bool) -> list[Leftover]:
    """Return the living processes whose RUN begins with ``run``, except this process."""
    found = []
    for process in psutil.process_iter():
        try:
            environment, command = process.environ(), process.cmdline()
        except psutil.Error:  # the process has ended, or belongs to another user
            continue
        if process.pid == os.getpid() or not environment.get(RUN, "").startswith(run):
            continue
        text = " ".join(command)
        if allow_helpers and any(helper in text for helper in END_WITH_PARENT):
            continue
        if command:  # a zombie has no command line
            found.append(
                Leftover(process.pid, text[:200], environment.get("PYTEST_CURRENT_TEST", "no test"))
            )
    return found


def programs_begin() -> bool:
    """Return True if a process is in the middle of starting a program.

    Popen returns before the kernel has stored command line and environment, and a busy machine may
    delay that.
    """
    for process in psutil.process_iter():
        try:
            is_kernel_thread = process.ppid() == KTHREADD or process.pid == KTHREADD
            is_nameless = not process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # the process has ended
            continue
        if is_nameless and not is_kernel_thread:
            return True
    return False


def end_leftovers(run: str, *, allow_helpers: bool) -> list[Leftover]:
    """Kill the processes that exist after GRACE_SECONDS, and return them."""
    began = time.monotonic()
    while programs_begin() and time.monotonic() < began + START_SECONDS:
        time.sleep(0.05)

    deadline = time.monotonic() + GRACE_SECONDS
    while (found := leftovers(run, allow_helpers)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for leftover in found:
        try:
            psutil.Process(leftover.pid).kill()
        except psutil.NoSuchProcess:
            continue
    return found


RUN_KEY = pytest.StashKey[str]()
FOUND_KEY = pytest.StashKey[list[str]]()


# -- hooks -----------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Mark this process's future children. A worker inherits the run's id from the controller."""
    worker = getattr(config, "workerinput", None)
    run = worker["leftover_run"] if worker else uuid.uuid4().hex
    config.stash[RUN_KEY] = run
    if not worker:
        guardian = _start_guardian(run)
        # At the very end of pytest, after the search for leftovers.
        config.add_cleanup(guardian.wait)
        config.add_cleanup(guardian.kill)  # cleanups run in reverse order
    config.stash[FOUND_KEY] = []
    os.environ[RUN] = f"{run}/{worker['workerid'] if worker else 'main'}"


def _start_guardian(run: str) -> subprocess.Popen[bytes]:
    """Start the program that ends the processes of ``run`` if this process is killed."""
    environment = {name: value for name, value in os.environ.items() if name != RUN}
    program = Path(__file__).with_name("end_with_pytest.py")
    return subprocess.Popen(
        [sys.executable, "-I", str(program), str(os.getpid()), run],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for pytest, which then ends this program
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send a worker of pytest-xdist the run's id. Its mark has no worker, so it is no leftover."""
    node.workerinput["leftover_run"] = node.config.stash[RUN_KEY]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Collect the findings of a worker. A crashed worker has none."""
    node.config.stash[FOUND_KEY] += getattr(node, "workeroutput", {}).get("leftovers", [])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        found = end_leftovers(os.environ[RUN], allow_helpers=True)
        config.workeroutput["leftovers"] = [str(leftover) for leftover in found]
        return

    # Without workers, this process has helpers. With workers, no process of theirs may be left.
    run = config.stash[RUN_KEY]
    distributed = bool(config.getoption("numprocesses", None))
    found = end_leftovers(
        f"{run}/gw" if distributed else f"{run}/main", allow_helpers=not distributed
    )
    config.stash[FOUND_KEY] += [str(leftover) for leftover in found]
    if config.stash[FOUND_KEY] and session.exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = config.stash[FOUND_KEY]
    if found:
        terminalreporter.section("processes that tests left behind (ended now)", red=True)
        for line in found:
            terminalreporter.write_line(line)
