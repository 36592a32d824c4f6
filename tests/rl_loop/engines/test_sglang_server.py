"""The supervisor of a server's process."""

import asyncio
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from rl_loop.engines.sglang.gpu_memory import NotEnoughGpuMemoryError, memory_fault
from rl_loop.engines.sglang.server import FIRST_BACK_OFF, ServerState, ServerStatus, SglangServer
from tests.support.waiting import PATIENCE_SECONDS


def test_supervisor_exception_is_raised_by_a_status_request(tmp_path):
    """No caller awaits the supervisor, so its errors would be lost and the server seem to start."""

    def command(host, port):
        raise ImportError("no module named ray")

    async def wait_for_the_server():
        server = SglangServer(command, {}, tmp_path / "log")
        for _ in range(1000):
            await server.status()
            await asyncio.sleep(0.01)

    with pytest.raises(ImportError, match="no module named ray"):
        asyncio.run(wait_for_the_server())


def test_server_outside_a_job_gets_an_address_without_ray():
    program = (
        "import sys; sys.modules['ray'] = None; "
        "from rl_loop.cluster.placement import free_address; print(*free_address())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GPTOSS_PLACED"}
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("127.0.0.1 ")


PROGRAM = """
import http.server, pathlib, sys
starts = pathlib.Path(sys.argv[2])
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))
say = sys.argv[3:]
if say[min(number, len(say) - 1)] != "serve":
    sys.exit(say[min(number, len(say) - 1)])

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
"""Program of a server that counts its starts, then serves or ends with a message."""
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def make_server(tmp_path: Path, *starts: str) -> SglangServer:
    """Return a server whose starts have these results.

    Args:
        tmp_path: directory of the counter and the log.
        starts: message with which each start ends, or "serve" for a healthy server. The last entry
            applies to all later starts.
    """

    def command(host: str, port: int) -> list[str]:
        return [sys.executable, "-c", PROGRAM, str(port), str(tmp_path / "starts"), *starts]

    return SglangServer(
        command,
        {},
        tmp_path / "log",
        memory_fault=partial(memory_fault, fraction=0.4),
    )


def count_starts(tmp_path: Path) -> int:
    path = tmp_path / "starts"
    return len(path.read_text()) if path.exists() else 0


async def reach(server: SglangServer, *states: ServerState, given_up: bool = False) -> ServerStatus:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (status := await server.status()).state not in states or status.given_up != given_up:
            await asyncio.sleep(0.01)
    return status


def test_server_without_memory_starts_once_and_names_the_remedy(tmp_path: Path) -> None:
    async def main() -> None:
        server = make_server(tmp_path, f"many\nlines\n{OUT_OF_MEMORY}\nand more")
        status = await reach(server, ServerState.DEAD, given_up=True)
        assert status.fault == (
            f"{OUT_OF_MEMORY}. Set rollout.engine.memory_fraction=0.35 or lower, or stop other processes on the GPU "
            f"(log: {tmp_path / 'log'})"
        )
        await server.stop()

    asyncio.run(main())
    assert count_starts(tmp_path) == 1


def test_unusable_memory_fraction_is_reported_without_a_start(tmp_path: Path) -> None:
    def command(host: str, port: int) -> list[str]:
        raise NotEnoughGpuMemoryError("rollout.engine.memory_fraction: set 0.36 to 0.40")

    async def main() -> None:
        server = SglangServer(command, {}, tmp_path / "log")
        status = await reach(server, ServerState.DEAD, given_up=True)
        assert status.fault == "rollout.engine.memory_fraction: set 0.36 to 0.40"
        await server.stop()

    asyncio.run(main())
    assert not (tmp_path / "log").exists()


def test_server_with_another_fault_is_restarted(tmp_path: Path) -> None:
    async def main() -> None:
        server = make_server(tmp_path, "no such port", "serve")
        await reach(server, ServerState.UNSYNCED)
        await server.stop()

    asyncio.run(main())
    assert count_starts(tmp_path) == 2


def test_server_that_has_served_restarts_after_lack_of_memory(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        server = make_server(tmp_path, "serve", OUT_OF_MEMORY, "serve")
        status = await reach(server, ServerState.UNSYNCED)
        server._kill()
        await reach(server, ServerState.DEAD)
        again = await reach(server, ServerState.UNSYNCED)
        assert again.incarnation != status.incarnation
        await server.stop()

    asyncio.run(main())
    assert count_starts(tmp_path) == 3


def test_no_server_starts_while_the_trainer_has_the_gpu(tmp_path: Path) -> None:
    async def main() -> None:
        server = make_server(tmp_path, "serve")
        await reach(server, ServerState.UNSYNCED)
        await server.block_starts()
        server._kill()
        await reach(server, ServerState.DEAD)
        await asyncio.sleep(2 * FIRST_BACK_OFF)  # the server would restart after half of it
        assert (await server.status()).state is ServerState.DEAD
        assert count_starts(tmp_path) == 1
        await server.allow_starts()
        await reach(server, ServerState.UNSYNCED)
        assert count_starts(tmp_path) == 2
        await server.stop()

    asyncio.run(main())


def test_server_start_ended_for_the_trainer_is_not_a_failure(
    tmp_path: Path,
) -> None:
    hangs = "import time; time.sleep(600)"
    starts = []

    def command(host: str, port: int) -> list[str]:
        starts.append(port)
        return [sys.executable, "-c", hangs]

    async def main() -> None:
        server = SglangServer(command, {}, tmp_path / "log", health_seconds=1)
        for _ in range(7):  # more than the limit of failures
            await server.allow_starts()
            await reach(server, ServerState.STARTING)
            while server._process is None:
                await asyncio.sleep(0.01)
            process = server._process
            await server.block_starts()
            assert process.poll() is not None
            assert not (await reach(server, ServerState.DEAD)).given_up
        await server.stop()

    asyncio.run(main())
    assert len(starts) == 7
