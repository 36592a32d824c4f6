"""Results of benchmarks.train: reason of a failed baseline, parts of a step, and predictions."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_gptoss import step_clock
from megatron_gptoss.token_dispatcher import AlltoAllTokenDispatcher

ROOT = Path(__file__).parents[2]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("benchmarks.train.cases")
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7_500_000_000)
    return module


def explained(train: ModuleType, error: Exception) -> dict[str, Any]:
    def fails(args: argparse.Namespace, ceiling: float) -> dict[str, Any]:
        raise error

    return train.measure_or_explain(fails, argparse.Namespace(), 1.0)


def test_failed_baseline_is_a_row_of_the_table(train: ModuleType) -> None:
    arguments = vars(train.argument_parser().parse_args(["stock", "--packed", "--sequences", "2"]))
    full = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee ...")
    no_kernel = ValueError("No dot product attention backend is available")
    lines = [
        {"arguments": arguments, "gpus": 1, **explained(train, full)},
        {"arguments": arguments, "gpus": 1, **explained(train, no_kernel)},
    ]
    rows = train.table(lines).splitlines()[2:]
    assert rows[0].startswith("| stock, packed | 1 | 24 | 8,192 |")
    assert "out of memory: CUDA out of memory. Tried to allocate 2 GiB. |" in rows[0]
    assert "ValueError: No dot product attention backend is available" in rows[1]
    assert rows[0].endswith("| 7.5 | - |")


def test_a_baseline_that_fails_on_one_of_several_ranks_ends_all(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 2)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        explained(train, torch.cuda.OutOfMemoryError("CUDA out of memory"))


def test_unpacked_row_counts_one_sequence(train: ModuleType) -> None:
    arguments = vars(train.argument_parser().parse_args(["stock", "--micro-batches", "3"]))
    measured = {"seconds": 0.5, "tokens_per_second_per_gpu": 8192.0, "mfu": 0.25, "peak_gb": 12.0}
    (row,) = train.table([{"arguments": arguments, "gpus": 4, **measured}]).splitlines()[2:]
    assert (
        row == "| stock | 4 | 24 | 12,288 | auto | 0.500 | - | 8,192 | 25.0% | - | - | 12.0 | - |"
    )


def test_tokens_per_rank_are_divided_by_ranks_of_a_row(train: ModuleType) -> None:
    arguments = ["step", "--context", "4", "--pipeline", "2", "--length", "8192"]
    line = {"arguments": vars(train.argument_parser().parse_args(arguments)), "gpus": 8}
    (row,) = train.table([{**line, "seconds": 1.0}]).splitlines()[2:]
    assert row.startswith("| step | 8 | 24 | 1,024 |")


def test_all_to_all_is_timed_separately(train: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    clock = train.AllToAllClock()
    clock.begin()
    clock("forward-compute").start()
    clock("all-to-all").start()
    clock("all-to-all").stop()
    clock("forward-compute").stop()
    clock("all-grads-sync").start(barrier=True)
    clock("all-grads-sync").stop()
    # A second passes between two marks. The forward pass has one before and one after the exchange.
    assert clock.end() == {
        "forward": 2.0,
        "backward": 0.0,
        "optimizer": 0.0,
        "communication": 1.0,
        "other": 3.0,
        "all-to-all": 1.0,
    }


def test_step_reports_measured_and_predicted_all_to_all_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A single rank would skip the exchange and its timers.
    monkeypatch.setattr(AlltoAllTokenDispatcher, "exchanges_tokens", True)
    train = importlib.import_module("benchmarks.train.cases")
    out = tmp_path / "step.jsonl"
    arguments = "step --tiny --layers 2 --experts 4 --length 24 --sequences 2 --steps 3"
    monkeypatch.setattr("sys.argv", ["train.py", *arguments.split(), "--out", str(out)])
    train.main()

    (line,) = (json.loads(text) for text in out.read_text().splitlines())
    parts = line["seconds_by_part"]
    assert sum(parts.values()) == pytest.approx(line["seconds"], rel=0.3)
    assert 0 < line["all_to_all_share"] == parts["all-to-all"] / sum(parts.values())
    # One rank has all experts, so the plan has no exchange. Its tensors have only a few MB.
    assert line["predicted_all_to_all_share"] == 0
    assert line["predicted_seconds"] > 0 and 0 < line["predicted_peak_gb"] < 0.1
    # With random weights, the loss is that of guessing among 128 tokens.
    assert line["losses"][0] == pytest.approx(4.85, abs=0.3)


def test_memory_segments_are_listed_with_their_owners(train: ModuleType) -> None:
    def block(size: int, state: str, *names: str) -> dict[str, Any]:
        frames = [{"filename": f"/x/{name}", "line": 7, "name": "f"} for name in names]
        return {"size": size, "state": state, "frames": frames}

    free = block(900_000_000, "inactive")
    cache = block(100_000_000, "active_allocated", "torch/nn.py", "ours.py", "main.py")
    small = block(2_000_000, "active_pending_free", "theirs.py")
    snapshot = [
        {"total_size": 902_000_000, "blocks": [small, free]},
        {"total_size": 100_000_000, "blocks": [cache]},
        {"total_size": 900_000_000, "blocks": [free]},
        {"total_size": 1_000_000_000, "blocks": [cache, free]},
        {"total_size": 2_900_000_000, "blocks": [small, free, free, cache]},
    ]
    summary, _, *lines = train.kept_segments(snapshot).splitlines()
    assert summary.startswith("4.60 GB")
    assert [line.split() for line in lines] == [
        ["2798.0", "102.0", "ours.py:7", "f;", "theirs.py:7", "f"],
        ["900.0", "100.0", "ours.py:7", "f"],
        ["900.0", "2.0", "theirs.py:7", "f"],
    ]


def shared_prefix_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *mode: str
) -> list[dict[str, Any]]:
    """Return the rows of a small run of the benchmark of shared prefixes."""
    module = importlib.import_module("benchmarks.train.shared_prefixes")
    out = tmp_path / "rows.jsonl"
    arguments = ["shared-prefixes", *mode, "--tiny", "--steps", "3", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    module.main()
    return [json.loads(text) for text in out.read_text().splitlines()]


def test_shared_prefixes_are_timed_with_equal_losses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, shared = shared_prefix_rows(monkeypatch, tmp_path)
    # Two groups of four sequences with 96 common and 12 other tokens.
    assert whole["computed tokens"] == shared["sequences' tokens"] == 2 * 4 * 108
    assert shared["computed tokens"] == 2 * (96 + 4 * 12)
    assert shared["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert whole["same bits"] and shared["same bits"]
    assert shared["speed-up"] == whole["update, s"] / shared["update, s"]


def test_profile_lists_the_calls_of_each_variant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared_prefix_rows(monkeypatch, tmp_path, "--profile")
    printed = capsys.readouterr().out
    for variant, tokens in (("whole", 216), ("shared", 144)):
        for call in ("update", "score"):
            assert f"\n{variant}, {call}: {tokens} tokens\n" in printed
            assert f"| {variant} | {call} | {tokens} |" in printed
    assert "aten::mm" in printed


def test_last_parameter_with_other_bits_is_named() -> None:
    module = importlib.import_module("benchmarks.train.shared_prefixes")
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    for parameter in layers.parameters():
        parameter.main_grad = torch.zeros(2)
    trainer = SimpleNamespace(module=layers)
    assert module.same_bits(trainer, lambda: None) == {"same bits": True, "differing from": "-"}

    def noisy() -> None:
        for name in ("0.weight", "1.bias"):
            layers.get_parameter(name).main_grad += 1

    expected = {"same bits": False, "differing from": "1.bias"}
    assert module.same_bits(trainer, noisy) == expected


def test_gradients_of_shared_prefixes_have_bf16_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = shared_prefix_rows(monkeypatch, tmp_path, "gradients")
    assert {"output_layer.weight", "decoder.layers.mlp.router.weight"} <= {
        row["parameters"] for row in rows
    }
    for row in rows:
        # Small tensors have errors of few roundings, so their ratio varies.
        assert 1e-3 < row["error, whole"] < 0.03 and 1e-3 < row["error, shared"] < 0.03, row
