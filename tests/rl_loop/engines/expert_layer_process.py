"""Runs ``expert_layer`` in processes that see the plugin of SGLang's servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rl_loop.engines.sglang.config import PLUGIN
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]


def hashes_of_products(*mends: str) -> str:
    """Return lines of hashes, after modules of the plugin have been installed.

    In a process of its own: a kernel that is compiled once in one stays as it is there."""
    path = os.pathsep.join([str(PLUGIN), *filter(None, sys.path)])
    program = [sys.executable, "-m", "tests.rl_loop.engines.expert_layer", ",".join(mends) or "-"]
    done = subprocess.run(
        [*program, "1", "8", "64", "100", "256", "4096"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 12
    return done.stdout
