"""The suite notices processes that its tests leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.leftover_processes import RUN
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]

CARELESS = """
import subprocess, sys
from pathlib import Path

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]

def test_one_ends_what_it_starts():
    subprocess.Popen(SLEEP).kill()

def test_one_leaves_a_process():
    child = subprocess.Popen(SLEEP, start_new_session=True)
    (Path(__file__).parent / "pid").write_text(str(child.pid))
"""


def start_suite(folder: Path, code: str, *options: str) -> subprocess.Popen[str]:
    (folder / "test_inner.py").write_text(code)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", RUN))
    }
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.support.leftover_processes",
            *options,
            "test_inner.py",
        ],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_suite(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    with start_suite(folder, code, *options) as suite:
        output, errors = suite.communicate()
    return subprocess.CompletedProcess(suite.args, suite.returncode, output, errors)


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Create a folder for an inner suite with a short grace period for leftover processes."""
    (tmp_path / "conftest.py").write_text(
        "from tests.support import leftover_processes\nleftover_processes.GRACE_SECONDS = 0.5\n"
    )
    return tmp_path


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_leftover_process_fails_the_run_and_is_killed(
    options: tuple[str, ...], short_grace: Path
) -> None:
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1000)"]
    )  # a child of this process, not of the inner suite
    try:
        done = run_suite(short_grace, CARELESS, *options)
        assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
        assert "2 passed" in done.stdout
        pid = int((short_grace / "pid").read_text())
        assert f"process {pid} of test_inner.py::test_one_leaves_a_process (call): " in done.stdout
        assert has_ended(pid)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_a_suite_that_leaves_nothing_passes(options: tuple[str, ...], short_grace: Path) -> None:
    clean = CARELESS.partition("def test_one_leaves")[0] + (
        "def test_a_helper_that_ends_with_its_parent():\n"
        "    import multiprocessing\n"
        "    process = multiprocessing.get_context('forkserver').Process(target=print)\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    done = run_suite(short_grace, clean, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left behind" not in done.stdout


KILLED = """
import os, subprocess, sys, time
from pathlib import Path

START = '''
import os, subprocess, sys
command = [sys.executable, "-c", "import time; time.sleep(1000)"]
child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
print(child.pid, flush=True)
os._exit(0)
'''

def test_one_is_killed_beside_what_it_has_started():
    # As a launch does: what was started in the background is nobody's child.
    started = subprocess.run([sys.executable, "-c", START], stdout=subprocess.PIPE, text=True)
    here = Path(__file__).parent
    (here / "writing").write_text(started.stdout)
    (here / "writing").rename(here / "pid")
    time.sleep(1000)
"""


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_processes_of_tests_end_when_pytest_is_killed(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    suite = start_suite(tmp_path, KILLED, *options)
    try:
        wait_until((tmp_path / "pid").exists, seconds=120)
        pid = int((tmp_path / "pid").read_text())
        assert not has_ended(pid)
    finally:
        suite.kill()
        suite.communicate()  # its workers also hold these pipes
    try:
        wait_until(lambda: has_ended(pid), seconds=60)
    finally:
        if not has_ended(pid):
            os.kill(pid, signal.SIGKILL)
