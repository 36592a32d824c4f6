"""Runs ``expert_layer`` in processes that see the plugin of SGLang's servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_loop.engines.sglang.config import PLUGIN
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[4]


NUMBERS_OF_TOKENS = (1, 8, 64, 100, 256, 4096)


def hashes_of_products(*patches: str) -> list[str]:
    """Return a hash per number of tokens and choice of scales, with modules of the plugin
    installed.
    """
    return [line.split()[-2] for line in _run(patches, 0, NUMBERS_OF_TOKENS)]


def runs_that_differ(*patches: str, runs: int, tokens: Sequence[int]) -> list[int]:
    """Return how many of ``runs`` further runs differ from the first, per tokens and scales."""
    return [int(line.split()[-1]) for line in _run(patches, runs, tokens)]


def _run(patches: Sequence[str], runs: int, tokens: Sequence[int]) -> list[str]:
    """Run ``expert_layer`` in a new process, because compiled kernels are cached in a process."""
    path = os.pathsep.join([str(PLUGIN), *filter(None, sys.path)])
    program = [sys.executable, "-m", "tests.support.rl_loop.engines.expert_layer"]
    done = subprocess.run(
        [*program, ",".join(patches) or "-", str(runs), *map(str, tokens)],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(tokens)
    return lines
