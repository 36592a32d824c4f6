"""The supervisor of a server's process."""

import asyncio
import os
import subprocess
import sys

import pytest

from rl_loop.engines.sglang.server import SglangServer


def test_a_fault_in_the_supervisor_reaches_who_asks_for_the_status(tmp_path):
    """Nobody awaits the supervisor: without this a server that can never start looks like one that has not yet."""

    def command(host, port):
        raise ImportError("no module named ray")

    async def wait_for_the_server():
        server = SglangServer(command, {}, tmp_path / "log")
        for _ in range(1000):
            await server.status()
            await asyncio.sleep(0.01)

    with pytest.raises(ImportError, match="no module named ray"):
        asyncio.run(wait_for_the_server())


def test_a_server_outside_a_job_gets_an_address_without_ray():
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
