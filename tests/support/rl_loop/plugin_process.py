"""Runs programs in processes that see the plugin of SGLang's servers, as a server does."""

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
    """Write stand-ins for modules of SGLang or triton_kernels, by their files within ``directory``."""
    for name, source in sources.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def run_with_plugin(
    *arguments: str, packages: Path | None = None, interpreted: bool = False
) -> str:
    """Run Python with ``arguments``, which has to succeed. Returns what it prints.

    Args:
        packages: a directory whose packages stand in for SGLang's.
        interpreted: whether Triton's kernels run in its interpreter, without a GPU. The program may
            import modules of the tests then.
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
