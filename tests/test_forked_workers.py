"""Workers of the tests' Ray are forks. They behave like workers that Ray starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from rl_loop.cluster.ray_session import _local_processes
from tests.support import forked_workers
from tests.support.processes import read_command
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
PROGRAM = """
import os, sys
import psutil, ray
from rl_loop.cluster.ray_session import start_local_ray

print(sys.argv[1:])
start_local_ray(num_cpus=1, object_store_bytes=100 << 20)
pid, parent = ray.get(ray.remote(lambda: (os.getpid(), os.getppid())).remote())
print(parent)
print(psutil.Process(pid).environ().get("THIS_RUN"))
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


def test_forked_worker_has_imports_and_separate_environment() -> None:
    actors = [Actor.remote() for _ in range(2)]
    processes = [ray.get(actor.process.remote()) for actor in actors]
    (server,) = forked_workers._servers
    assert len({pid for pid, _, _ in processes}) == 2
    for pid, parent, modules in processes:
        assert parent == server.pid
        assert {"torch", "megatron.core", "transformers"} <= modules
        assert "ray::Actor" in psutil.Process(pid).cmdline()[0]

    # Ray sets this variable for a worker, but not for the server.
    raylets = {ray.get(actor.variable.remote("RAY_RAYLET_PID")) for actor in actors}
    processes_of_ray = _local_processes()
    assert processes_of_ray is not None and raylets == {str(processes_of_ray.raylet)}

    # OpenMP reads these variables in the server, before the fork.
    servers = psutil.Process(server.pid).environ()
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        assert servers[name] == ray.get(actors[0].variable.remote(name))


def test_forked_worker_of_a_program_shows_its_mark(tmp_path: Path) -> None:
    """Tests find the processes of a command by a variable in their environment."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [*forked_workers.python_with_forks(), str(program), "an argument"],
        cwd=ROOT,
        env={**os.environ, "THIS_RUN": "marked", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (server,) = forked_workers._servers
    assert done.stdout.split("\n")[:3] == ["['an argument']", str(server.pid), "marked"]


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
