"""Runs programs in processes that see the plugin of SGLang's servers."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from rl_loop.cluster.placement import exit_with_parent
from rl_loop.engines.sglang.config import PLUGIN
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]


def plugin_module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module of the plugin into this process, if there is a triton_kernels for it."""
    pytest.importorskip("triton_kernels", reason="sglang-kernel is not installed")
    monkeypatch.syspath_prepend(str(PLUGIN))
    return importlib.import_module(name)


def write_modules(directory: Path, sources: dict[str, str]) -> None:
    """Write replacements for modules of SGLang or triton_kernels to files in ``directory``."""
    for name, source in sources.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def run_with_plugin(
    *arguments: str, packages: Path | None = None, interpreted: bool = False
) -> str:
    """Run Python with ``arguments``, and return its output. The program must succeed.

    The program is a fork of a process that has imported torch and Triton.

    Args:
        arguments: arguments of the interpreter.
        packages: directory whose packages replace SGLang's.
        interpreted: whether Triton interprets kernels, without a GPU. The program may then import
            modules of the tests.
    """
    path = [str(PLUGIN)] if packages is None else [str(PLUGIN), str(packages)]
    if interpreted:
        path.append(str(ROOT))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    server = _server(interpreted)
    assert server.stdin and server.stdout
    with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
        request = {
            "arguments": arguments,
            "environment": environment,
            "timeout": int(PATIENCE_SECONDS),
            "output": output.name,
            "errors": errors.name,
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = server.stdout.readline()
        assert status == "0\n", f"exit status {status}{errors.read().decode()}"
        return output.read().decode()


@cache
def _server(interpreted: bool) -> subprocess.Popen[str]:
    """Start a server. Triton reads TRITON_INTERPRET when it is imported."""
    # With one thread, OpenMP starts none that a fork would lack. The programs need no more: Triton's
    # interpreter and compiler use one.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("plugin_server.py"))],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=exit_with_parent,
        start_new_session=True,
    )
