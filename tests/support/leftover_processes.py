"""No test leaves a process behind: a pytest plugin that looks for them at the end of the session, names them and the
test that started them, ends them, and fails the run.

Where pytest is killed and can look for nothing, a program beside it ends them (``end_with_pytest``).

Children inherit the environment, so a variable there says that a process is ours and not that of another run on the
same machine, whoever its parent is by now; pytest's own PYTEST_CURRENT_TEST beside it says which test was running."""

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
"""For processes that are ending, such as those of Ray after ``ray.shutdown``."""

START_SECONDS = 5.0
"""How long a process may take from fork to the first instruction of its program."""

KTHREADD = 2
"""The parent of the kernel's threads, which have no command line either."""

END_WITH_PARENT = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "multiprocessing.spawn",  # Megatron's writer of checkpoints, which waits for the next one
    "torch_shm_manager",
    "rl_loop.forked_server",  # one for all answers of a process
    "forked_workers/server.py",
)
"""Helpers that live as long as the process that started them; another process looks for those afterwards."""


@dataclass(frozen=True)
class Leftover:
    """A process that outlived the session."""

    pid: int
    command: str
    test: str

    def __str__(self) -> str:
        return f"process {self.pid} of {self.test}: {self.command}"


def leftovers(run: str, allow_helpers: bool) -> list[Leftover]:
    """Living processes whose RUN begins with ``run``, but for this one."""
    found = []
    for process in psutil.process_iter():
        try:
            environment, command = process.environ(), process.cmdline()
        except psutil.Error:  # it has ended, or it is another user's
            continue
        if process.pid == os.getpid() or not environment.get(RUN, "").startswith(run):
            continue
        text = " ".join(command)
        if allow_helpers and any(helper in text for helper in END_WITH_PARENT):
            continue
        if command:  # a zombie has none
            found.append(
                Leftover(process.pid, text[:200], environment.get("PYTEST_CURRENT_TEST", "no test"))
            )
    return found


def programs_begin() -> bool:
    """Say whether a process is in the middle of starting a program: Popen returns before the
    kernel has put command line and environment in their places, and a busy machine may leave it at
    that for a while."""
    for process in psutil.process_iter():
        try:
            is_kernel_thread = process.ppid() == KTHREADD or process.pid == KTHREADD
            is_nameless = not process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # it has ended
            continue
        if is_nameless and not is_kernel_thread:
            return True
    return False


def end_leftovers(run: str, *, allow_helpers: bool) -> list[Leftover]:
    """Kill what is still there after GRACE_SECONDS and return it."""
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


# -- hooks -----------------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Mark this process's future children. A worker has the id of the run from the controller that started it."""
    worker = getattr(config, "workerinput", None)
    run = worker["leftover_run"] if worker else uuid.uuid4().hex
    config.stash[RUN_KEY] = run
    if not worker:
        guardian = _start_guardian(run)
        # At the very end of pytest, which has looked for leftovers by then.
        config.add_cleanup(guardian.wait)
        config.add_cleanup(guardian.kill)  # cleanups come last first
    config.stash[FOUND_KEY] = []
    os.environ[RUN] = f"{run}/{worker['workerid'] if worker else 'main'}"


def _start_guardian(run: str) -> subprocess.Popen[bytes]:
    """Start what ends the processes of ``run`` when this process is killed. It is none of them."""
    environment = {name: value for name, value in os.environ.items() if name != RUN}
    program = Path(__file__).with_name("end_with_pytest.py")
    return subprocess.Popen(
        [sys.executable, "-I", str(program), str(os.getpid()), run],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for pytest, which ends it in order
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist the id of the run. It is itself no leftover: its own mark has no worker."""
    node.workerinput["leftover_run"] = node.config.stash[RUN_KEY]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Take over what a worker found; one that crashed has nothing to say."""
    node.config.stash[FOUND_KEY] += getattr(node, "workeroutput", {}).get("leftovers", [])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        found = end_leftovers(os.environ[RUN], allow_helpers=True)
        config.workeroutput["leftovers"] = [str(leftover) for leftover in found]
        return

    # without workers this process has helpers of its own; with them, nothing of theirs may be left, crashed or not
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
