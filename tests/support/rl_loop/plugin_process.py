"""Runs programs in processes that see the plugin of SGLang's servers."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
