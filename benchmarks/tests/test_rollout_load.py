"""Run of benchmarks.sglang rollouts: mock SGLang servers under a load similar to a rollout."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rl_loop.engines.protocol import GenerateRequest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rollout_load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("benchmarks.sglang.rollout_load")


def test_servers_are_measured_in_sequence(tmp_path: Path) -> None:
    stub = f"{ROOT / 'tests/support/rl_loop/sglang_process'}:{ROOT}:{ROOT / 'kernels'}"
    program = [sys.executable, "-m", "benchmarks.sglang", "rollouts", "--device", "cpu", "--tiny"]
    program += ["--layers", "2", "--transport", "gloo", "--attention", "intel_amx"]
    program += ["--pythonpath", stub, "--running", "3", "--prompt", "20", "--tokens", "8"]
    program += ["--rounds", "2", "--seconds", "0.5", "--out", str(tmp_path / "table")]
    program += ["--log", str(tmp_path / "log"), "--variants", "tuned", "gathered_8"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["variant"] for line in lines if line["case"] == "start"] == ["tuned", "gathered_8"]
    (row,) = (line for line in lines if line["case"] == "rollouts")
    for name in ("tuned", "gathered_8"):
        assert len(row[f"{name}_all"]) == 2
        assert row[f"{name}_tokens_per_second"] > 0
    first, second = (tmp_path / "table").read_text().splitlines()[2:]
    assert first.startswith("| 3 | tuned |") and "**1.00**" in first
    assert second.startswith("| 3 | gathered 8 |")


class Engine:
    """Engine that answers after a fixed time, with the maximum number of tokens."""

    def __init__(self, seconds: float, fails_at: int = 10**6) -> None:
        self.seconds = seconds
        self.fails_at = fails_at
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> SimpleNamespace:
        self.requests.append(request)
        if len(self.requests) >= self.fails_at:
            raise RuntimeError("the server died")
        await asyncio.sleep(self.seconds)
        return SimpleNamespace(output_ids=[7] * request.sampling.max_new_tokens)


def load_of(rollout_load: ModuleType, engine: Engine, log: Path) -> SimpleNamespace:
    options = argparse.Namespace(prompt=5, tokens=3)
    variant = SimpleNamespace(engine=engine, log=log)
    config = SimpleNamespace(vocab_size=1024)
    return rollout_load.Load(variant, "1/0", options, config)


def test_round_counts_turns_that_ended_in_it(
    rollout_load: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_load, "TOOL_SECONDS", 1e-6)
    log = tmp_path / "log"
    log.write_text("Prefill batch, #new-seq: 99, earlier\n")
    engine = Engine(0.02)
    load = load_of(rollout_load, engine, log)
    measured = asyncio.run(rollout_load.run_round(load, 4, 0.4))

    assert measured.turn_seconds == pytest.approx(0.02, rel=0.5)
    assert measured.sequences is None  # no new line in the log
    # The first turns, and those that end after the round, are not counted.
    tokens = [tokens for _, tokens, _ in load.turns]
    counted = measured.tokens_per_second * 0.4
    assert 0.5 * sum(tokens) < counted < sum(tokens) - sum(tokens[:3])
    # Each turn has the previous turn and a tool's answer. After 8 turns, a new prompt follows.
    lengths: dict[str, list[int]] = {}
    for request in engine.requests:
        lengths.setdefault(request.episode, []).append(len(request.input_ids))
    for turns in lengths.values():
        assert turns[0] == 5
        assert len(turns) <= rollout_load.TURNS
        assert all(after - before > rollout_load.TOOL_TOKENS for before, after in pairwise(turns))
    assert max(map(len, lengths.values())) == rollout_load.TURNS


def test_a_server_that_dies_ends_the_round_with_its_error(
    rollout_load: ModuleType, tmp_path: Path
) -> None:
    load = load_of(rollout_load, Engine(0.001, fails_at=9), tmp_path / "none")
    with pytest.raises(RuntimeError, match="the server died"):
        asyncio.run(rollout_load.run_round(load, 2, 60.0))


def test_prefills_are_read_from_new_server_output(rollout_load: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Prefill batch, #new-seq: 64, #new-token: 1\n")
    printed = log.stat().st_size
    with log.open("a") as file:
        file.write("[03:45] Prefill batch, #new-seq: 1, #new-token: 13\nDecode batch\n")
        file.write("Prefill batch, #new-seq: 4, #new-token: 52\n")
    assert rollout_load.sequences_of_a_prefill(log, printed) == 2.5
    assert rollout_load.sequences_of_a_prefill(tmp_path / "none", 0) is None


def test_prefill_delay_variant_has_its_server_options(rollout_load: ModuleType) -> None:
    words = rollout_load.gathered(8).arguments
    assert words[0] == "--enable-prefill-delayer"
    assert words[words.index("--prefill-delayer-max-delay-passes") + 1] == "8"
