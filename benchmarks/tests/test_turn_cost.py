"""Run of benchmarks.rollouts turns: the processor time of a rollout worker per turn."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.forked_workers import forked_python

ROOT = Path(__file__).parents[2]


def test_new_routes_cost_less_than_those_of_the_whole_episode() -> None:
    program = [*forked_python(), "-m", "benchmarks.rollouts", "turns"]
    program += ["--lengths", "4000", "--turns", "16", "--concurrent", "4"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    _, row = done.stdout.splitlines()
    length, without, new_tokens, whole_episode = (
        float(word) for word in row.replace("ms", "").split()
    )
    assert length == 4000
    # The whole episode has 20 times as many experts to read and to check.
    assert 0 < without < whole_episode
    assert 2 * new_tokens < whole_episode
