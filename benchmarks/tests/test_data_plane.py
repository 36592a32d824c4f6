"""Run of benchmarks/data/plane.py with real Ray: its byte counts equal the computed ones."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_workers import forked_python

ROOT = Path(__file__).parents[2]
TOKENS = 16 * 8192


@pytest.fixture(scope="module")
def cases() -> dict[tuple[int, str], dict[str, Any]]:
    """Return the benchmark's lines, by layers of routes and passes."""
    program = [
        *forked_python(),
        "-m",
        "benchmarks.data",
        "plane",
        "--shapes",
        "16x8192",
        "--ranks",
        "2",
    ]
    done = subprocess.run(
        [*program, "--layers", "0", "36", "--rounds", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(line["layers"], line["passes"]): line for line in lines}


def test_data_plane_benchmark_measures_every_case(
    cases: dict[tuple[int, str], dict[str, Any]],
) -> None:
    assert set(cases) == {
        (0, "plain"),
        (0, "R2"),
        (0, "estimates"),
        (36, "plain"),
        (36, "estimates"),
    }
    for case in cases.values():
        assert case["tokens"] == TOKENS
        assert case["ranks"] == 2
        assert 0 < case["rank_cpu_seconds"] < case["together_seconds"]
        assert case["driver_peak"] > 0


def test_sent_bytes_per_token_match_its_columns(
    cases: dict[tuple[int, str], dict[str, Any]],
) -> None:
    """Ids, mask, the engine's log-probs and advantages are sent, but not stored routes."""
    for layers in (0, 36):
        assert cases[layers, "plain"]["wire_bytes_per_token"] == pytest.approx(
            4 + 1 + 4 + 4, abs=0.3
        )
    assert cases[0, "plain"]["route_bytes_per_token"] == 0
    # The last of 8,192 tokens is not an input, so it has no routes.
    assert cases[36, "plain"]["route_bytes_per_token"] == pytest.approx(
        36 * 4 * 8191 / 8192, abs=1e-3
    )


def test_update_answers_have_8_bytes_per_token(
    cases: dict[tuple[int, str], dict[str, Any]],
) -> None:
    """Each data-parallel rank returns the trainer's log-probs and entropies once."""
    for layers in (0, 36):
        assert cases[layers, "plain"]["answer_bytes_per_token"] == pytest.approx(4 + 4, abs=0.1)


def test_estimates_are_returned_once_and_sent_again(
    cases: dict[tuple[int, str], dict[str, Any]],
) -> None:
    plain, estimates = cases[0, "plain"], cases[0, "estimates"]
    sent = estimates["wire_bytes_per_token"] - plain["wire_bytes_per_token"]
    assert sent == pytest.approx(3 * 4, abs=0.3), "ids and mask once, three columns more"
    answered = estimates["answer_bytes_per_token"] - plain["answer_bytes_per_token"]
    assert answered == pytest.approx(2 * 4, abs=0.1)


def test_routes_of_the_ranks_own_pass_add_nothing_on_the_wire(
    cases: dict[tuple[int, str], dict[str, Any]],
) -> None:
    for name in ("wire_bytes_per_token", "answer_bytes_per_token", "route_bytes_per_token"):
        assert cases[0, "R2"][name] == pytest.approx(cases[0, "plain"][name], abs=0.01)
