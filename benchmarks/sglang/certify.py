"""Certification of an SGLang server with random weights.

``python -m benchmarks.sglang certify --attention fa3 --python /opt/sglang/bin/python`` writes
weights, starts a server with them and runs the checks. It needs one GPU. ``--python`` and
``--pythonpath`` select SGLang's environment. With ``--attention triton``, the plugin of
docs/design/sglang.md adds the last key of the window to decoding. With ``--without-plugin``, the
certification must fail. Prints the report and its path. The exit code is that of ``gptoss
certify``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch.certify_report import write_report
from rl_loop.certify.model import FIRST, prepare
from rl_loop.certify.run import CertifyOptions, certify
from rl_loop.cluster.placement import free_port
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.python_environment import inherited_environment


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", default="fa3", help="SGLang's attention backend")
    parser.add_argument("--python", default=sys.executable, help="of SGLang's environment")
    parser.add_argument("--pythonpath", default="", help="of the server")
    parser.add_argument("--without-plugin", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--size", default="gpu", choices=["tiny", "small", "gpu"])
    parser.add_argument(
        "--server-arguments", default="--disable-cuda-graph --disable-piecewise-cuda-graph"
    )
    parser.add_argument("--start-seconds", type=float, default=300)
    parser.add_argument("--out", type=Path, default=Path("certify_report"))
    return parser.parse_args()


def server_command(options: argparse.Namespace, model: Path, port: int) -> list[str]:
    words = [options.python, "-m", "sglang.launch_server", "--model-path", str(model)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    words += ["--attention-backend", options.attention]
    # triton_kernel, SGLang's default for GPT-OSS, does not record routes.
    words += ["--moe-runner-backend", "triton", "--enable-return-routed-experts"]
    words += ["--mem-fraction-static", "0.3"]
    # Same as in a run (rl_loop/engines/sglang/server_command.py).
    words += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
    if options.deterministic:
        words += ["--enable-deterministic-inference", "--disable-radix-cache"]
    return words + shlex.split(options.server_arguments)


def server_environment(options: argparse.Namespace) -> dict[str, str]:
    settings = SglangConfig(
        python=options.python,
        attention_backend=options.attention,
        deterministic=options.deterministic,
        env={"PYTHONPATH": options.pythonpath},
    )
    environment = inherited_environment() | settings.environment
    # The tuned settings are for the released sizes only.
    environment.pop("SGLANG_MOE_CONFIG_DIR", None)
    if options.without_plugin:
        environment.pop("GPTOSS_SGLANG_PATCHES", None)
    return environment


async def wait_for(url: str, server: subprocess.Popen[bytes], seconds: float) -> None:
    client = SglangClient(url)
    deadline = time.monotonic() + seconds
    while not await client.healthy(seconds=20):
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        if time.monotonic() > deadline:
            raise SystemExit(f"the server did not answer within {seconds:.0f} s")
        await asyncio.sleep(1)
    await client.close()


def end_with_an_error(number: int, frame: object) -> None:
    """Raise SystemExit, so that the server is stopped, too."""
    raise SystemExit(128 + number)


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, end_with_an_error)
    with tempfile.TemporaryDirectory() as directory:
        prepare(Path(directory), options.size, "bf16")
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        options.out.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with (options.out / "server.log").open("wb") as log:
            server = subprocess.Popen(
                server_command(options, Path(directory) / FIRST, port),
                env=server_environment(options),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            asyncio.run(wait_for(url, server, options.start_seconds))
            ready = time.monotonic()
            result = certify(
                CertifyOptions(url, Path(directory), "bf16", options.deterministic),
                lambda check: print(f"{check.status.value:11}  {check.name}", flush=True),
            )
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    print(result.to_text())
    print(f"server started in {ready - began:.0f} s, checks took {time.monotonic() - ready:.0f} s")
    print(write_report(result, options.out))
    raise SystemExit(0 if result.has_passed else 1)
