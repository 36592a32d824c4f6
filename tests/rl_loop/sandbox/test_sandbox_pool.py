"""Pool of sandbox servers: concurrency, replacement, deaths, close, and the end of its owner."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_loop.sandbox import (
    PythonSandbox,
    SandboxConfig,
    SandboxError,
    SandboxUnavailableError,
    connection,
)
from rl_loop.sandbox.inside.process_watch import ProcessWatch

HONEST = "print(sum(range(1000)))"


@pytest.fixture
def one_worker(make_sandbox: Callable):
    sandbox = make_sandbox(timeout_seconds=5)
    assert sandbox.run(HONEST).output == "499500\n"
    return sandbox


def find_fork_server(sandbox) -> int:
    """Return the process id of the fork-server.

    After the processes of the last call have ended, it is the only process without children.
    """
    assert sandbox.processes_left() == 0

    def childless() -> list[int]:
        found = []
        for pid in sandbox.processes():
            try:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            except OSError:  # the process has ended after it was listed
                continue
            found += [] if children else [pid]
        return found

    # An ending process stays listed as a child of the server for a moment.
    assert wait_for(lambda: len(childless()) == 1), childless()
    return childless()[0]


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_calls_run_at_the_same_time_on_all_servers(make_sandbox: Callable) -> None:
    sandbox = make_sandbox(servers=2)
    span = (
        "import time; begun = time.monotonic(); time.sleep(1.5); print({}, begun, time.monotonic())"
    )
    results = sandbox.run_many([span.format(number) for number in range(4)])
    spans = [[float(word) for word in result.output.split()] for result in results]
    assert [number for number, _, _ in spans] == [0, 1, 2, 3]
    running = [sum(begun <= other < ended for _, begun, ended in spans) for _, other, _ in spans]
    assert max(running) == 2
    # The clock starts after the supervisor gets the notice of the set-up, late on a busy machine.
    assert all(0.75 <= result.seconds < 30 for result in results)


def test_server_is_replaced_after_its_maximum_of_calls(make_sandbox: Callable) -> None:
    sandbox = make_sandbox(calls_per_server=3)
    servers = []
    for _ in range(7):
        assert sandbox.run(HONEST).output == "499500\n"
        wait_for(lambda: len(sandbox.processes()) == 3)
        servers.append(find_fork_server(sandbox))
    assert servers[0] == servers[1] != servers[3] == servers[4] != servers[6]


def test_server_is_replaced_after_a_killed_call(one_worker) -> None:
    before = find_fork_server(one_worker)
    assert one_worker.run("raise ValueError").exit_code == 1
    assert find_fork_server(one_worker) == before
    assert one_worker.run("import ctypes; ctypes.string_at(0)").exit_code == -11
    assert one_worker.run(HONEST).output == "499500\n"
    assert find_fork_server(one_worker) != before


def test_server_killed_between_calls_fails_no_call(one_worker) -> None:
    for _ in range(3):
        os.kill(find_fork_server(one_worker), signal.SIGKILL)
        result = one_worker.run(HONEST)
        assert (result.output, result.error) == ("499500\n", None)


def test_server_killed_during_a_call_is_a_sandbox_failure(one_worker, tmp_path: Path) -> None:
    server = find_fork_server(one_worker)
    failures: list[SandboxError] = []

    def call() -> None:
        with pytest.raises(SandboxError) as failure:
            one_worker.run("import time; time.sleep(4)")
        failures.append(failure.value)

    thread = threading.Thread(target=call)
    thread.start()
    assert wait_for(lambda: len(one_worker.processes()) == 5)
    time.sleep(0.2)  # the set-up takes milliseconds, so the program runs after this
    os.kill(server, signal.SIGKILL)
    thread.join()
    assert "exited" in str(failures[0])
    assert failures[0].failure_source == "server died"
    assert one_worker.run(HONEST).output == "499500\n"
    assert one_worker.processes_left() == 0


@pytest.fixture
def short_grace() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "GRACE_SECONDS", 1.0)
        yield


def test_hung_server_is_replaced(make_sandbox: Callable, short_grace: None) -> None:
    sandbox = make_sandbox(timeout_seconds=0.5)
    assert sandbox.run(HONEST).output == "499500\n"
    os.kill(find_fork_server(sandbox), signal.SIGSTOP)
    # The server hung before the program began, so the call is repeated on the new server.
    assert sandbox.run(HONEST).output == "499500\n"
    assert sandbox.processes_left() == 0


PTRACE_CONT, PTRACE_SEIZE, PTRACE_O_TRACEEXIT = 7, 0x4206, 0x40


def test_result_does_not_wait_for_processes_that_end_slowly(
    make_sandbox: Callable, short_grace: None
) -> None:
    """A busy machine may need longer to end many processes than the limit for a hung server."""
    sandbox = make_sandbox(timeout_seconds=1.5)
    call = sandbox.start("import time; time.sleep(60)")
    program = running_program(sandbox)
    # A traced process stops at its exit until the tracer continues it.
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(PTRACE_SEIZE, program, None, ctypes.c_void_p(PTRACE_O_TRACEEXIT)) == 0
    result = call.result(30)
    assert (result.timed_out, result.exit_code) == (True, -9)
    os.waitpid(program, 0)
    assert libc.ptrace(PTRACE_CONT, program, None, None) == 0
    os.waitpid(program, 0)
    assert sandbox.run(HONEST).output == "499500\n"


def test_servers_are_not_in_the_owners_process_group(one_worker) -> None:
    assert one_worker.processes_left() == 0
    assert os.getpgrp() not in {os.getpgid(pid) for pid in one_worker.processes()}


def test_sandbox_runs_calls_of_two_event_loops_in_threads(one_worker) -> None:
    outputs: list[str] = []

    def call(number: int) -> None:
        async def several() -> None:
            for _ in range(20):
                outputs.append((await one_worker.sandbox.run(f"print({number})")).output)

        asyncio.run(several())

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outputs) == ["0\n"] * 20 + ["1\n"] * 20


def test_cancelled_call_leaves_the_sandbox_usable(one_worker) -> None:
    async def cancel() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one_worker.sandbox.run("import time; time.sleep(4)"), 0.2)

    asyncio.run(cancel())
    assert one_worker.run(HONEST).output == "499500\n"


def test_close_fails_pending_calls_and_permits_a_restart() -> None:
    async def scenario() -> None:
        sandbox = PythonSandbox(SandboxConfig(servers=1))
        await sandbox.start()
        calls = [asyncio.create_task(sandbox.run("import time; time.sleep(60)")) for _ in range(3)]
        await asyncio.sleep(0.2)
        await asyncio.wait_for(sandbox.close(), 40)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [(type(result), str(result)) for result in results] == [
            (SandboxError, "the sandbox was closed")
        ] * 3
        with pytest.raises(RuntimeError, match="not running"):
            await sandbox.run(HONEST)
        await sandbox.close()
        await sandbox.start()  # a closed sandbox can start again
        assert (await sandbox.run(HONEST)).output == "499500\n"
        await sandbox.close()

    asyncio.run(scenario())


def test_sandbox_processes_end_with_their_owner() -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import asyncio\nfrom rl_loop.sandbox import PythonSandbox\n"
            "async def main():\n    sandbox = PythonSandbox()\n    await sandbox.start()\n"
            "    calls = [asyncio.create_task(sandbox.run('import time; time.sleep(9)')) for _ in range(2)]\n"
            "    await asyncio.sleep(0.3)\n    print('up', flush=True)\n    await asyncio.gather(*calls)\n"
            "asyncio.run(main())",
        ],
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    children = Path(f"/proc/{owner.pid}/task")
    started = {
        int(pid) for task in children.iterdir() for pid in (task / "children").read_text().split()
    }
    inside = {
        int(pid)
        for pid in started
        for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    }
    assert len(started) == len(inside) == 2
    owner.kill()
    owner.wait()
    owner.stdout.close()
    # Process 1 of each namespace is gone, so the kernel has ended all processes of the namespace.
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started | inside))


def running_program(sandbox) -> int:
    """Return the process id of the program of a running call."""
    assert wait_for(lambda: len(sandbox.processes()) == 5)
    time.sleep(0.5)
    (program,) = [
        pid
        for pid in sandbox.processes()
        if Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    ]
    return program


@pytest.fixture
def full_cgroup(tmp_path: Path) -> Iterator[Path]:
    """A cgroup of 16 MB in place of a container that is out of memory."""
    for base, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = base / f"gptoss-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(16 << 20))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        yield group
        wait_for(lambda group=group: not (group / "cgroup.procs").read_text())  # type: ignore[misc]
        group.rmdir()
        return
    pytest.skip("no memory cgroup can be made here")


def test_machine_out_of_memory_is_a_sandbox_failure(
    make_sandbox: Callable, full_cgroup: Path
) -> None:
    sandbox = make_sandbox(timeout_seconds=30, use_cgroup=False)
    code = "import time\ntime.sleep(2)\nblock = bytearray(b'x') * (64 << 20)\nprint('kept')"
    call = sandbox.start(code)
    (full_cgroup / "cgroup.procs").write_text(str(running_program(sandbox)))
    with pytest.raises(SandboxError, match="out of memory") as failure:
        call.result(30)
    assert failure.value.failure_source == "machine out of memory"
    assert sandbox.run(HONEST).output == "499500\n"


def test_unexplained_kill_is_a_failure_of_the_program(one_worker) -> None:
    """A program can be killed in many ways, so an unexplained kill is its failure."""
    call = one_worker.start("import time; time.sleep(4)")
    os.kill(running_program(one_worker), signal.SIGKILL)
    result = call.result(10)
    assert (result.exit_code, result.interpreter_ended) == (-9, True)
    assert "SIGKILL" in (result.error or "")
    assert one_worker.run(HONEST).output == "499500\n"


@pytest.mark.parametrize(
    ("oom", "oom_kill", "killed_for", "by_machine"),
    [(0, 0, None, False), (1, 0, None, False), (1, 2, "memory", False), (0, 1, None, True)],
)
def test_cgroup_events_separate_own_limit_and_machine(
    oom: int, oom_kill: int, killed_for: str | None, by_machine: bool, tmp_path: Path
) -> None:
    """The kernel counts a killed process in ``oom_kill`` for any exceeded limit."""
    events = tmp_path / "memory.events"
    text = "low 0\nhigh 0\nmax 7\noom {}\noom_kill {}\noom_group_kill 0\n"
    events.write_text(text.format(3, 4))
    descriptor = os.open(events, os.O_RDONLY)
    try:
        watch = ProcessWatch(1 << 30, 1 << 16, descriptor, has_cpu_weight=True)
        events.write_text(text.format(3 + oom, 4 + oom_kill))
        assert watch.killed_by_own_limit() == killed_for
        assert watch.killed_by_machine() == by_machine
    finally:
        os.close(descriptor)


def test_server_that_cannot_start_is_a_sandbox_failure(
    one_worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise SandboxUnavailableError("no room")

    monkeypatch.setattr("rl_loop.sandbox.python_sandbox.ServerProcess", fail)
    os.kill(find_fork_server(one_worker), signal.SIGKILL)
    with pytest.raises(SandboxError, match="no room"):
        one_worker.run(HONEST)
    monkeypatch.undo()
    assert one_worker.run(HONEST).output == "499500\n"
