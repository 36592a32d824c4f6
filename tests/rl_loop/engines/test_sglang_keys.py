"""Servers of a run answer its clients only."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from rl_loop.engines.sglang.client import RequestRejectedError, SglangClient
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.server import ServerState, SglangServer
from tests.support.processes import read_command
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
KEY = "0123456789" * 6  # a number in YAML
PROTECTED = {
    "/generate": {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}},
    "/update_weights_from_disk": {"model_path": "/tmp"},
    "/release_memory_occupation": {"tags": ["weights"]},
    "/flush_cache": {},
    "/server_info": None,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt_oss", "swiglu_limit": 7.0, "num_hidden_layers": 2}'
    )
    return tmp_path


def test_server_answers_only_with_its_key(model: Path) -> None:
    """A real process gets the key like SGLang, and one client does not have the key."""

    def command(host: str, port: int) -> list[str]:
        words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        return [*words, "--host", host, "--port", str(port)]

    async def check() -> None:
        paths = [ROOT / "tests/support/rl_loop/sglang_process", ROOT, ROOT / "kernels"]
        environment = {"PYTHONPATH": ":".join(map(str, paths))}
        server = SglangServer(command, environment, model / "server.log", api_key=KEY)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not (status := await server.status()).healthy:
                    assert not status.fault, status.fault
                    await asyncio.sleep(0.1)
            assert status.state is ServerState.UNSYNCED

            for key in (None, "", KEY[:-1]):
                attacker = SglangClient(status.url, api_key=key)
                for path, body in PROTECTED.items():
                    with pytest.raises(RequestRejectedError, match="HTTP 401"):
                        await attacker.call(path, body, seconds=PATIENCE_SECONDS)
                await attacker.close()

            friend = SglangClient(status.url, api_key=KEY)
            await friend.call("/server_info", seconds=PATIENCE_SECONDS)
            await friend.close()

            # Neither the command line, which all users see, nor a remaining file contains the key.
            (process,) = (
                child
                for child in psutil.Process().children()
                if "sglang.launch_server" in read_command(child)
            )
            words = process.cmdline()
            assert KEY not in " ".join(words)
            assert KEY not in str(process.environ())
            assert not Path(words[words.index("--config") + 1]).exists()
            assert KEY not in (model / "server.log").read_text()
            assert (model / "server.log").stat().st_mode & 0o777 == 0o600
        finally:
            await server.stop()

    asyncio.run(check())


@pytest.mark.parametrize(
    "argument", ["--api-key", "--admin-api-key=x", "--config", "--tokenizer-worker-num=2"]
)
def test_server_arguments_that_disable_the_key_are_rejected(argument: str) -> None:
    with pytest.raises(ValueError, match=f"rollout.engine.arguments: {argument.split('=')[0]} "):
        SglangConfig(arguments=[argument, "x"])
