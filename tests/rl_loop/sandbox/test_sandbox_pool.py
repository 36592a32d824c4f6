"""The pool: concurrency, recycling, lost servers, closing, and dying with its owner."""

from __future__ import annotations

import asyncio
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
    SandboxFailure,
    SandboxUnavailable,
    connection,
)

HONEST = "print(sum(range(1000)))"


@pytest.fixture
def one_worker(make_sandbox: Callable):
    sandbox = make_sandbox(timeout_seconds=5)
    assert sandbox.run(HONEST).output == "499500\n"
    return sandbox


def server_of(sandbox) -> int:
    """Process id of the fork-server: the only one without children once the last call's processes are gone."""
    assert sandbox.processes_left() == 0

    def childless() -> list[int]:
        found = []
        for pid in sandbox.processes():
            try:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            except OSError:  # it has ended since it was listed
                continue
            found += [] if children else [pid]
        return found

    # a process that is just ending is still listed as a child of the server for a moment
    assert wait_for(lambda: len(childless()) == 1), childless()
    return childless()[0]


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_calls_run_at_the_same_time_on_all_workers(make_sandbox: Callable) -> None:
    sandbox = make_sandbox(workers=2)
    span = (
        "import time; begun = time.monotonic(); time.sleep(0.5); print({}, begun, time.monotonic())"
    )
    results = sandbox.run_many([span.format(number) for number in range(4)])
    spans = [[float(word) for word in result.output.split()] for result in results]
    assert [number for number, _, _ in spans] == [0, 1, 2, 3]
    running = [sum(begun <= other < ended for _, begun, ended in spans) for _, other, _ in spans]
    assert max(running) == 2
    # their clock starts when the supervisor hears that they are set up, on a busy machine a little late
    assert all(0.25 <= result.seconds < 5 for result in results)


def test_server_is_replaced_after_its_number_of_calls(make_sandbox: Callable) -> None:
    sandbox = make_sandbox(calls_per_server=3)
    servers = []
    for _ in range(7):
        assert sandbox.run(HONEST).output == "499500\n"
        wait_for(lambda: len(sandbox.processes()) == 3)
        servers.append(server_of(sandbox))
    assert servers[0] == servers[1] != servers[3] == servers[4] != servers[6]


def test_server_is_replaced_after_a_call_that_was_killed(one_worker) -> None:
    before = server_of(one_worker)
    assert one_worker.run("raise ValueError").exit_code == 1
    assert server_of(one_worker) == before
    assert one_worker.run("import ctypes; ctypes.string_at(0)").exit_code == -11
    assert one_worker.run(HONEST).output == "499500\n"
    assert server_of(one_worker) != before


def test_server_killed_between_calls_costs_no_call(one_worker) -> None:
    for _ in range(3):
        os.kill(server_of(one_worker), signal.SIGKILL)
        result = one_worker.run(HONEST)
        assert (result.output, result.error) == ("499500\n", None)


def test_server_killed_during_a_call_is_a_failure_of_the_sandbox_and_not_run_twice(
    one_worker, tmp_path: Path
) -> None:
    server = server_of(one_worker)
    failures: list[SandboxFailure] = []

    def call() -> None:
        with pytest.raises(SandboxFailure) as failure:
            one_worker.run("import time; time.sleep(4)")
        failures.append(failure.value)

    thread = threading.Thread(target=call)
    thread.start()
    assert wait_for(lambda: len(one_worker.processes()) == 5)
    time.sleep(0.2)  # the program has begun: its set-up takes milliseconds
    os.kill(server, signal.SIGKILL)
    thread.join()
    assert "died" in str(failures[0])
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
    os.kill(server_of(sandbox), signal.SIGSTOP)
    # it hung before the program began: the call is made again on the new server
    assert sandbox.run(HONEST).output == "499500\n"
    assert sandbox.processes_left() == 0


def test_interrupt_of_the_owners_terminal_does_not_reach_the_servers(one_worker) -> None:
    assert one_worker.processes_left() == 0
    assert os.getpgrp() not in {os.getpgid(pid) for pid in one_worker.processes()}


def test_run_from_two_event_loops_in_two_threads(one_worker) -> None:
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
            await asyncio.wait_for(one_worker.sandbox.run("import time; time.sleep(1)"), 0.2)

    asyncio.run(cancel())
    assert one_worker.run(HONEST).output == "499500\n"


def test_close_answers_running_and_waiting_calls_and_leaves_no_process() -> None:
    async def scenario() -> None:
        sandbox = PythonSandbox(SandboxConfig(workers=1))
        await sandbox.start()
        calls = [asyncio.create_task(sandbox.run("import time; time.sleep(9)")) for _ in range(3)]
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        await sandbox.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [(type(result), str(result)) for result in results] == [
            (SandboxFailure, "the sandbox was closed")
        ] * 3
        assert time.monotonic() - begun < 5
        with pytest.raises(RuntimeError, match="not running"):
            await sandbox.run(HONEST)
        await sandbox.close()
        await sandbox.start()  # it can be started again
        assert (await sandbox.run(HONEST)).output == "499500\n"
        await sandbox.close()

    asyncio.run(scenario())


def test_sandbox_dies_with_its_owner() -> None:
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
    # process 1 of each namespace is gone, so the kernel has ended all that ran in it
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started | inside))


def test_a_program_killed_by_the_host_is_a_failure_of_the_sandbox(one_worker) -> None:
    """As by the kernel when the machine, or the container around it, is out of memory."""
    call = one_worker.start("import time; time.sleep(4)")
    assert wait_for(lambda: len(one_worker.processes()) == 5)
    time.sleep(0.5)
    servers = one_worker.processes()
    (program,) = [
        pid for pid in servers if Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    ]
    os.kill(program, signal.SIGKILL)
    with pytest.raises(SandboxFailure, match="out of memory"):
        call.result(10)
    assert one_worker.run(HONEST).output == "499500\n"


def test_a_server_that_can_not_start_is_a_failure_of_the_sandbox(
    one_worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise SandboxUnavailable("no room")

    monkeypatch.setattr("rl_loop.sandbox.python_sandbox.ServerProcess", fail)
    os.kill(server_of(one_worker), signal.SIGKILL)
    with pytest.raises(SandboxFailure, match="no room"):
        one_worker.run(HONEST)
    monkeypatch.undo()
    assert one_worker.run(HONEST).output == "499500\n"
