"""Imbalance of experts in ``benchmarks/experts/load.py``, and the value of the memory estimate."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.forked_workers import forked_python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("benchmarks.experts.load")


def test_fullest_rank_is_computed_per_layer_and_over_all_layers(benchmark: ModuleType) -> None:
    # The first rank has 75% of the first layer's tokens, the last rank 75% of the second layer's.
    counts = [[4, 2, 1, 1], [1, 1, 4, 2]]
    assert benchmark.rank_loads(counts[0], 2) == [1.5, 0.5]
    assert benchmark.layer_imbalance(counts, 2) == 1.5
    assert benchmark.model_imbalance([[3, 3, 3, 3]] * 2, 2) == 1.0

    # One expert of each layer has all 8 tokens. A rank has both experts with a probability of 50%.
    assert benchmark.model_imbalance([[8, 0], [8, 0]], 2) == pytest.approx(1.5, abs=0.1)


def test_load_of_a_model_is_printed_with_the_memory_estimate() -> None:
    program = [
        *forked_python(),
        "-m",
        "benchmarks.experts",
        "load",
        "--layers",
        "2",
        "--experts",
        "8",
    ]
    program += ["--inner", "32", "--sequences", "2", "--length", "48", "--ranks", "1", "4"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    one, four = done.stdout.splitlines()[-2:]
    assert one == "| 1 | 0.0% | 0.0% | 0.0% |"
    cells = [float(cell.strip().rstrip("%")) for cell in four.split("|")[2:-1]]
    in_one_layer, in_all_layers, estimate = cells
    assert in_one_layer > in_all_layers > 0
    assert estimate == pytest.approx(20, abs=1)  # two experts on each of four ranks
