"""Workers of the tests' Ray are forks. They behave like workers that Ray starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from rl_loop.cluster.ray_exit import local_processes
from tests.support import forked_workers
from tests.support.processes import read_command
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
PROGRAM = """
import atexit, os, sys
import psutil, ray
from rl_loop.cluster.ray_session import start_local_ray

print(sys.argv[1:])
start_local_ray(num_cpus=1, object_store_bytes=100 << 20)
pid, parent = ray.get(ray.remote(lambda: (os.getpid(), os.getppid())).remote())
print(parent)
print(psutil.Process(pid).environ().get("THIS_RUN"))
print(os.getppid())
atexit.register(lambda: print("the program has ended", file=sys.stderr))
sys.exit(3)
"""
WAITING_PROGRAM = """
import atexit, os, signal, sys

def stop(number, frame):
    print("signal", number)
    sys.exit(5)

signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
atexit.register(lambda: print("at exit"))
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    with forked_workers.local_ray(num_cpus=1, object_store_bytes=100 << 20):
        yield


@ray.remote(num_cpus=0)
class Actor:
    def process(self) -> tuple[int, int, set[str]]:
        """Return the process id, the parent's id, and the imported modules."""
        return os.getpid(), os.getppid(), set(sys.modules)

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


def is_server(pid: int) -> bool:
    return "forked_workers/server.py" in read_command(psutil.Process(pid))


def test_forked_worker_has_imports_and_separate_environment() -> None:
    actors = [Actor.remote() for _ in range(2)]
    processes = [ray.get(actor.process.remote()) for actor in actors]
    assert len({pid for pid, _, _ in processes}) == 2
    (server,) = {parent for _, parent, _ in processes}
    assert is_server(server)
    for pid, _, modules in processes:
        assert {"torch", "megatron.core", "transformers"} <= modules
        assert "ray::Actor" in psutil.Process(pid).cmdline()[0]

    # Ray sets this variable for a worker, but not for the server.
    raylets = {ray.get(actor.variable.remote("RAY_RAYLET_PID")) for actor in actors}
    processes_of_ray = local_processes()
    assert processes_of_ray is not None and raylets == {str(processes_of_ray.raylet)}

    # OpenMP reads these variables in the server, before the fork.
    servers = psutil.Process(server).environ()
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        assert servers[name] == ray.get(actors[0].variable.remote(name))


def run_program(python: list[str], program: Path) -> list[str]:
    """Run a program with a marked environment, and return the lines of its output."""
    done = subprocess.run(
        [*python, str(program), "an argument"],
        cwd=ROOT,
        env={**os.environ, "THIS_RUN": "marked", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert "the program has ended" in done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("python", [forked_workers.python_with_forks, forked_workers.forked_python])
def test_forked_worker_of_a_program_shows_its_mark(
    python: Callable[[], list[str]], tmp_path: Path
) -> None:
    """Tests find the processes of a command by a variable in their environment."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments, server, mark, parent = run_program(python(), program)
    assert arguments == "['an argument']"
    assert is_server(int(server))
    assert mark == "marked"
    is_fork = python is forked_workers.forked_python
    assert (parent == server) == is_fork


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_forked_program_gets_signals(number: int, tmp_path: Path) -> None:
    """The status shows the signal, and a killed command leaves no fork."""
    program = tmp_path / "program.py"
    program.write_text(WAITING_PROGRAM)
    process = subprocess.Popen(
        [*forked_workers.forked_python(), str(program)],
        env={**os.environ, "THIS_RUN": "marked", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    fork = psutil.Process(int(process.stdout.readline()))
    process.send_signal(number)
    said = process.stdout.read()
    assert said == ("" if number == signal.SIGKILL else f"signal {number}\nat exit\n")
    assert process.wait() == (-number if number == signal.SIGKILL else 5)
    wait_until(lambda: not fork.is_running())


def is_dead(actor: Any) -> bool:
    try:
        ray.get(actor.process.remote())
    except RayActorError:
        return True
    return False


@pytest.mark.parametrize("ended_by", ["a signal", "Ray"])
def test_ended_worker_and_its_placeholder_process_disappear(ended_by: str) -> None:
    def standing_for_workers() -> set[int]:
        processes = psutil.Process().children(recursive=True)
        return {p.pid for p in processes if "ask_for_fork.py" in read_command(p)}

    actor = Actor.remote()
    pid, _, _ = ray.get(actor.process.remote())
    before = standing_for_workers()
    assert before

    if ended_by == "Ray":
        ray.kill(actor)
    else:
        os.kill(pid, signal.SIGKILL)
    # A request that was sent just before the end may still get an answer.
    wait_until(lambda: is_dead(actor))
    wait_until(lambda: not psutil.pid_exists(pid))
    wait_until(lambda: before - standing_for_workers())
