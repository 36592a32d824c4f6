"""Start, priority and end of a local Ray, also on a busy machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pytest

from rl_loop.cluster import ray_exit, ray_session
from tests.support.waiting import PATIENCE_SECONDS, wait_until

ROOT = Path(__file__).parents[3]

HOLD = """
import os, re, sys, threading, time
from pathlib import Path

import psutil
from ray._private import services

from rl_loop.cluster import ray_session

go_on = Path(os.environ["FOLDER"]) / "go_on"


def waiting(program):
    '''A script that runs ``program`` with its arguments once the file ``go_on`` exists.'''
    script = Path(os.environ["FOLDER"]) / "waiting.sh"
    script.write_text(f'#!/bin/sh\\nuntil [ -e {go_on} ]; do sleep 0.1; done\\nexec {program} "$@"\\n')
    script.chmod(0o755)
    return str(script)


def hold_agent(wanted):
    if wanted == "dashboard_agent":
        ray_session.IDLE_AGENT = (waiting(sys.executable), *ray_session.IDLE_AGENT[1:])
    build = services._build_python_executable_command_memory_profileable

    def command(component, session_dir, unbuffered=True):
        assert component in ("dashboard_agent", "runtime_env_agent", "log_monitor", "dashboard"), component
        if component == wanted:
            return [waiting(sys.executable)]
        return build(component, session_dir, unbuffered)

    services._build_python_executable_command_memory_profileable = command


def hold_raylet():
    services.RAYLET_EXECUTABLE = waiting(services.RAYLET_EXECUTABLE)


def hold_control_store():
    services.GCS_SERVER_EXECUTABLE = waiting(services.GCS_SERVER_EXECUTABLE)
"""


def run_program(code: str, folder: Path, **environment: str) -> str:
    """Run a Python program that must succeed, and return its output."""
    done = start_program(code, folder, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start_program(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a new process. The program can delay parts of Ray."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    settings = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-c", HOLD + textwrap.dedent(code)],
        env={**settings, "PYTHONPATH": paths, "FOLDER": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("agent", ["dashboard_agent", "runtime_env_agent"])
def test_ray_starts_before_its_slow_agents(agent: str, tmp_path: Path) -> None:
    """Here the agent begins its imports only at the end. On two busy cores they need 30 s.

    By default Ray waits 15 s, ends its raylet and reports after 30 s that the node timed out.
    """
    program = f"""
        hold_agent({agent!r})
        from rl_loop.cluster.ray_session import ray_session
        with ray_session():
            import ray
            assert not go_on.exists() and go_on.with_name("waiting.sh").exists()
            print("up before the agent")
            go_on.touch()
            print(ray.get(ray.remote(lambda: "a task ran").remote()))
    """
    assert run_program(program, tmp_path).splitlines()[:2] == ["up before the agent", "a task ran"]


def test_start_waits_for_a_raylet_beyond_rays_time_limit(tmp_path: Path) -> None:
    """Ray's clock is 100 times too fast, so Ray's limit is 0.3 s. The raylet starts after 3 s."""
    program = """
        from ray._private import node
        class FastClock:
            def __getattr__(self, name):
                return getattr(time, name)
            def monotonic(self):
                return 100 * time.monotonic()
        node.time = FastClock()
        hold_raylet()
        threading.Timer(3, go_on.touch).start()
        from rl_loop.cluster.ray_session import ray_session
        with ray_session():
            print("up", go_on.exists())
    """
    assert run_program(program, tmp_path, RAY_raylet_start_wait_time_s="1").strip() == "up True"


@pytest.mark.parametrize("part", ["raylet", "control_store"])
def test_failed_ray_start_is_one_sentence_and_leaves_no_process(part: str, tmp_path: Path) -> None:
    """By default Ray reports after 30 s that it timed out waiting for a file or for the node."""
    program = f"""
        from rl_loop.cluster.ray_session import RayStartError, start_local_ray
        hold_{part}()
        try:
            start_local_ray(seconds=1)
        except RayStartError as error:
            print(error)
        left = psutil.wait_procs(psutil.Process().children(), timeout=30)[1]
        print([child.name() for child in left])
    """
    error, left = (
        run_program(program, tmp_path, RAY_raylet_start_wait_time_s="1").strip().split("\n")
    )
    assert re.fullmatch(
        r"Ray did not start within 1 s \(load \d+ on \d+ processors\)\. Stop other work on this "
        r"machine, or see its logs: /.*/logs",
        error,
    )
    assert left == "[]"


def test_local_ray_has_no_idle_programs_and_keeps_priorities(
    tmp_path: Path,
) -> None:
    program = """
        from rl_loop.cluster.ray_session import ray_session

        def niceness(pid):
            # the name, in brackets, may hold spaces; nice is field 19 of proc(5)
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])

        with ray_session():
            import ray

            class Worker:
                def pid(self):
                    return os.getpid()

            actor = ray.remote(Worker).remote()
            print(niceness(ray.get(actor.pid.remote())) - niceness(os.getpid()))
            from tests.support.processes import read_command
            # The programs in the agents' places get the agents' arguments.
            commands = [
                re.split("(idle|lazy)_agent.py", command)[0]
                for command in map(read_command, psutil.Process().children(recursive=True))
            ]
            idle = ("/monitor.py", "/dashboard.py", "/dashboard/agent.py", "RuntimeEnvAgent")
            print([name for name in idle if any(name in command for command in commands)])
            print(any("raylet" in command for command in commands))
            task = ray.remote(lambda: os.environ["COLOR"])
            print(ray.get(task.options(runtime_env={"env_vars": {"COLOR": "red"}}).remote()))
    """
    assert run_program(program, tmp_path).splitlines() == ["0", "[]", "True", "red"]


@pytest.mark.parametrize(
    ("agent", "options"),
    [
        ("IDLE_AGENT", ["--option"]),
        ("LAZY_AGENT", ["--node-ip-address=127.0.0.1", "--runtime-env-agent-port=0"]),
    ],
)
def test_agent_ends_with_the_process_that_started_it(agent: str, options: list[str]) -> None:
    program = f"""
        import subprocess, time
        from rl_loop.cluster.ray_session import {agent}

        print(subprocess.Popen([*{agent}, *{options}], stdout=subprocess.DEVNULL).pid)
        time.sleep(1)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    parent = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    agent = int(parent.stdout)
    wait_until(lambda: not psutil.pid_exists(agent))


def test_only_ray_session_starts_ray() -> None:
    """A Ray that is started elsewhere has Ray's default limits and priority."""
    own = {"rl_loop/cluster/ray_session.py", "tests/rl_loop/cluster/test_ray_session.py"}
    files = [
        path
        for folder in ("rl_loop", "launch", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    starting = {str(path.relative_to(ROOT)) for path in files if "ray.init(" in path.read_text()}
    assert starting - own == set()


def test_threads_of_a_local_ray_do_not_spin_for_long_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With libgomp's default and one busy loop, the demo's SFT on two threads was 9x slower."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert ray_session.local_environment()["GOMP_SPINCOUNT"] == "1000"

    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert ray_session.local_environment()["GOMP_SPINCOUNT"] == "7"

    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in ray_session.local_environment()


@pytest.mark.parametrize("killed", ["node", "control store", None])
def test_death_of_a_ray_process_is_reported_unless_it_is_closed(
    killed: str | None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes replace the parts of Ray, and ``os._exit`` does not end this process."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    parts = {name: subprocess.Popen(["sleep", "600"]) for name in ("node", "control store")}
    pids = [part.pid for part in parts.values()]
    with ray_exit.end_with_message_on_exit(ray_exit.RayProcesses(*pids)):
        if killed is not None:
            parts[killed].kill()
            # Without its control store, the node is ended.
            parts["node"].wait(PATIENCE_SECONDS)
            wait_until(lambda: "ray's processes" not in [t.name for t in threading.enumerate()])
    for part in parts.values():
        part.kill()
        part.wait()

    lines = capfd.readouterr().err.splitlines()
    named = [line.partition(" on this machine")[0] for line in lines if "has died" in line]
    assert named == ([] if killed is None else [f"gptoss: Ray's {killed}"])
    assert statuses == ([] if killed is None else [1])


def test_death_of_a_node_is_reported_after_the_drivers_death(tmp_path: Path) -> None:
    """The driver ends at once, before its threads can act, as if Ray's C++ code had ended it."""
    program = """
        import ctypes, signal, subprocess
        from rl_loop.cluster.ray_exit import RayProcesses, end_with_message_on_exit
        node = subprocess.Popen(["sleep", "30"], stderr=subprocess.DEVNULL)
        with end_with_message_on_exit(RayProcesses(node.pid, os.getppid())):
            sys.setswitchinterval(3600)
            sleep_with_the_interpreter_locked = ctypes.PyDLL(None).usleep
            node.kill()
            sleep_with_the_interpreter_locked(500_000)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = start_program(program, tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert "gptoss: Ray's node on this machine (raylet, process" in done.stderr


def test_run_ends_at_once_with_the_reason_if_its_gcs_dies(tmp_path: Path) -> None:
    """By default Ray waits for a minute, here to store a function."""
    program = """
        from rl_loop.cluster.ray_exit import local_processes
        from rl_loop.cluster.ray_session import ray_session
        with ray_session():
            import ray
            processes = local_processes()
            programs = [psutil.Process(processes.raylet), psutil.Process(processes.control_store)]
            print(*[program.name() for program in programs], flush=True)
            children = psutil.Process().children(recursive=True)
            print(*[child.pid for child in children], flush=True)
            programs[1].kill()
            ray.get(ray.remote(lambda: time.sleep(1e6)).remote())
    """
    done = start_program(program, tmp_path)
    assert done.returncode != 0
    programs, children = done.stdout.splitlines()
    assert programs.split() == ["raylet", "gcs_server"]
    assert "gptoss: Ray's control store on this machine (gcs_server, process" in done.stderr
    pids = [int(pid) for pid in children.split()]
    wait_until(lambda: not [pid for pid in pids if psutil.pid_exists(pid)], lambda: pids)


def test_gcs_keeps_few_records_of_calls(tmp_path: Path) -> None:
    """By default it keeps 100,000 and grows to hundreds of megabytes in a long run."""
    program = """
        from rl_loop.cluster.ray_session import ray_session
        with ray_session():
            import ray
            from ray._raylet import GcsClient

            @ray.remote
            class Counter:
                def count(self):
                    return 1

            counter = Counter.remote()
            for _ in range(15):
                ray.get([counter.count.remote() for _ in range(100)])
            time.sleep(3)  # records are sent every second
            client = GcsClient(address=ray.get_runtime_context().gcs_address)
            from ray.core.generated import gcs_service_pb2 as service, gcs_service_pb2_grpc as stubs
            from ray._private.grpc_utils import init_grpc_channel
            channel = init_grpc_channel(ray.get_runtime_context().gcs_address)
            request = service.GetTaskEventsRequest()
            reply = stubs.TaskInfoGcsServiceStub(channel).GetTaskEvents(request, timeout=30)
            print(len(reply.events_by_task))
    """
    assert 0 < int(run_program(program, tmp_path)) <= 1000
