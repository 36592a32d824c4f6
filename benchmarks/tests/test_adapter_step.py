"""Run of benchmarks/train/adapters.py from its arguments to its table, on a CPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def adapter_step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("benchmarks.train.adapters")


def test_adapter_benchmark_prints_a_row_for_every_case(
    adapter_step: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "results.jsonl"
    arguments = (
        "--tiny --layers 2 --experts 4 --rank 8 --length 24 --sequences 2 --micro-batches 2 "
        f"--steps 3 --cases mxfp4 bf16 full unmerged --out {out}"
    )
    monkeypatch.setattr("sys.argv", ["adapter_step.py", *arguments.split()])
    torch.manual_seed(0)
    adapter_step.main()

    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [result["case"] for result in results] == ["mxfp4", "bf16", "full", "unmerged"]
    packed, dense, full, unmerged = results
    assert unmerged["trained_parameters"] == packed["trained_parameters"]
    assert all(result["tokens"] == 2 * 2 * 24 for result in results)
    assert packed["trained_parameters"] == dense["trained_parameters"]
    assert full["trained_parameters"] > 3 * packed["trained_parameters"]
    # With random weights, the loss is that of guessing among 128 tokens.
    assert all(result["losses"][0] == pytest.approx(4.85, abs=0.3) for result in results)

    *_, title, line, first, second, third, _ = capsys.readouterr().out.splitlines()
    assert title.count("|") == line.count("|") == first.count("|") == third.count("|")
    assert first.startswith("| mxfp4 | 1 | 2 | 96 |") and first.endswith("| 1.00 |")
    assert second.startswith("| bf16 | 1 | 2 | 96 |")


def test_random_base_depends_only_on_seed(adapter_step: ModuleType) -> None:
    from megatron_gptoss.layers.mxfp4_weight import Mxfp4Weight

    weights = []
    for seed in (0, 0, 1):
        weight = Mxfp4Weight(64, 64)
        weight.register_parameter("a", torch.nn.Parameter(torch.empty(2, 2)))
        adapter_step.draw_adapted_model(weight, seed)
        weights.append(weight.read().clone().float())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert weights[0].std().item() == pytest.approx(0.02, rel=0.1)


def test_save_benchmark_prints_a_row_per_save(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    adapter_checkpoint = importlib.import_module("benchmarks.train.adapter_checkpoint")
    # The benchmark replaces the function in its own process.
    monkeypatch.setattr(adapter_checkpoint.state, "base_digest", lambda model: "")
    out = tmp_path / "results.jsonl"
    arguments = f"--tiny --layers 2 --experts 4 --rank 8 --saves 2 --out {out}"
    monkeypatch.setattr("sys.argv", ["adapter_checkpoint.py", *arguments.split()])
    adapter_checkpoint.main()

    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first["chunks"] == second["chunks"]
    assert 2e-9 < second["adapter_gigabytes"] / second["trained_parameters"] < 3e-9
    # Linux counts in ticks.
    assert -0.1 < second["held_up_seconds"] < second["adapter_seconds"] + 0.1
    # bf16 weights, fp32 master weights and two moments
    assert second["gigabytes"] > 14 * second["trained_parameters"] / 1e9
    *_, title, line, _, last = capsys.readouterr().out.splitlines()
    assert title.count("|") == line.count("|") == last.count("|")
