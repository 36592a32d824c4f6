"""Run of benchmarks.sglang rollouts: mock SGLang servers under a load similar to a rollout."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import math
import subprocess
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks.sglang.server_log import ServerRollout
from rl_loop.engines.protocol import GenerateRequest
from tests.support.forked_workers import forked_python

ROOT = Path(__file__).parents[2]
TOOL_TOKENS = (4, 9)


@pytest.fixture
def rollout_load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("benchmarks.sglang.rollout_load")


def test_servers_are_measured_in_sequence(tmp_path: Path) -> None:
    stub = f"{ROOT / 'tests/support/rl_loop/sglang_process'}:{ROOT}:{ROOT / 'kernels'}"
    program = [*forked_python(), "-m", "benchmarks.sglang", "rollouts", "--device", "cpu", "--tiny"]
    program += ["--layers", "2", "--transport", "gloo", "--attention", "intel_amx"]
    program += ["--pythonpath", stub, "--running", "3", "--prompt", "20", "--tokens", "8"]
    program += ["--rounds", "2", "--seconds", "0.5", "--out", str(tmp_path / "table")]
    program += ["--log", str(tmp_path / "log"), "--variants", "tuned", "gathered_8"]
    program += ["--tool-tokens", "2", "6"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["variant"] for line in lines if line["case"] == "start"] == ["tuned", "gathered_8"]
    (row,) = (line for line in lines if line["case"] == "rollouts")
    for name in ("tuned", "gathered_8"):
        assert len(row[f"{name}_all"]) == 2
        assert row[f"{name}_tokens_per_second"] > 0
        # The mock server scores tokens as it samples them.
        assert row[f"{name}_log_prob_gap"] == pytest.approx(0, abs=1e-6)
    first, second = (tmp_path / "table").read_text().splitlines()[2:]
    assert first.startswith("| 3 | tuned |") and "**1.00**" in first
    assert second.startswith("| 3 | gathered 8 |")


class Engine:
    """Engine that answers after a fixed time, with the maximum number of tokens."""

    def __init__(self, seconds: float, fails_at: int = 10**6) -> None:
        self.seconds = seconds
        self.fails_at = fails_at
        self.requests: list[GenerateRequest] = []
        self.aborts = 0

    async def generate(self, request: GenerateRequest) -> SimpleNamespace:
        self.requests.append(request)
        if len(self.requests) >= self.fails_at:
            raise RuntimeError("the server died")
        await asyncio.sleep(self.seconds)
        tokens = request.sampling.max_new_tokens
        return SimpleNamespace(output_ids=[7] * tokens, output_log_probs=[-0.5] * tokens)

    async def abort(self) -> None:
        self.aborts += 1

    async def score(self, tokens: list[int]) -> list[float]:
        """Return the log-probs of all tokens but the first. Those of tokens 7 are sampled."""
        return [-0.25 if token == 7 else math.nan for token in tokens[1:]]


def build_load(rollout_load: ModuleType, engine: Engine, log: Path) -> SimpleNamespace:
    options = argparse.Namespace(prompt=5, tokens=3, tool_tokens=TOOL_TOKENS, device="cuda")
    variant = SimpleNamespace(engine=engine, log=log)
    config = SimpleNamespace(vocab_size=1024)
    return rollout_load.Load(variant, "1/0", options, config)


def test_round_counts_turns_that_ended_in_it(
    rollout_load: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_load, "TOOL_SECONDS", 1e-6)
    log = tmp_path / "log"
    log.write_text(prefill_line(99))
    engine = Engine(0.02)
    load = build_load(rollout_load, engine, log)
    measured = asyncio.run(rollout_load.run_round(load, 4, 0.4))

    assert measured.turn_seconds == pytest.approx(0.02, rel=0.5)
    assert measured.server == ServerRollout((), ())  # no new line in the log
    assert engine.aborts == 1
    # The first turns, and those that end after the round, are not counted.
    tokens = [tokens for _, tokens, _ in load.turns]
    counted = measured.tokens_per_second * 0.4
    assert 0.5 * sum(tokens) < counted < sum(tokens) - sum(tokens[:3])
    # Each turn has the previous turn and a tool's answer. After 8 turns, a new prompt follows.
    lengths: dict[str, list[int]] = {}
    for request in engine.requests:
        assert request.return_routed_experts
        assert request.routes_start < len(request.input_ids)
        lengths.setdefault(request.episode, []).append(len(request.input_ids))
    for turns in lengths.values():
        assert turns[0] == 5
        assert len(turns) <= rollout_load.TURNS
        grown = [after - before for before, after in pairwise(turns)]
        # At least one sampled token, at most 4 times the mean of 3.
        assert all(TOOL_TOKENS[0] < tokens <= TOOL_TOKENS[1] + 12 for tokens in grown)
    assert max(map(len, lengths.values())) == rollout_load.TURNS


def test_a_server_that_dies_ends_the_round_with_its_error(
    rollout_load: ModuleType, tmp_path: Path
) -> None:
    load = build_load(rollout_load, Engine(0.001, fails_at=9), tmp_path / "none")
    with pytest.raises(RuntimeError, match="the server died"):
        asyncio.run(rollout_load.run_round(load, 2, 60.0))


def prefill_line(requests: int, tokens: int = 40, graph: bool = True) -> str:
    return (
        f"[03:45] Prefill batch, #new-seq: {requests}, #new-token: {tokens}, #cached-token: 9, "
        f"#running-req: 30, #queue-req: 0, cuda graph: {graph}, input throughput (token/s): 400.0\n"
    )


def decode_lines(speeds: list[float]) -> str:
    return "".join(
        f"Decode batch, #running-req: 32, gen throughput (token/s): {speed}\n" for speed in speeds
    )


def test_prefills_are_read_from_new_server_output(rollout_load: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(prefill_line(64))
    printed = log.stat().st_size
    with log.open("a") as file:
        file.write(prefill_line(1, tokens=13) + prefill_line(4, tokens=600, graph=False))
    server = rollout_load.rollout_after(log, printed)
    rounds = [rollout_load.Round(4.0, tokens, 0.5, server) for tokens in (100.0, 300.0, 110.0)]
    values = rollout_load.summary(rounds, running=32)
    assert (values["tokens_per_second"], values["all"]) == (110, [100, 300, 110])
    assert (values["prefills"], values["eager"]) == (0.5, 0.25)
    assert (values["requests"], values["prefill_tokens"]) == (2.5, 306.5)
    assert values["in_prefills"] is values["in_stalls"] is None, "too few lines about decoding"
    assert rollout_load.rollout_after(tmp_path / "none", 0).prefills == ()


def test_time_in_prefills_is_read_from_server_output(
    rollout_load: ModuleType, tmp_path: Path
) -> None:
    """Every second interval has a prefill and lasts twice as long: a third of the time."""
    log = tmp_path / "log"
    log.write_text((prefill_line(1) + decode_lines([1000]) + decode_lines([2000])) * 20)
    one = rollout_load.Round(8.0, 1.0, 0.5, rollout_load.rollout_after(log, 0))
    intervals = one.server.intervals
    assert [interval.seconds for interval in intervals[:2]] == pytest.approx([0.16, 0.32], rel=0.05)
    values = rollout_load.summary([one], running=32)
    assert values["in_prefills"] == pytest.approx(1 / 3, abs=0.02)
    assert values["in_stalls"] == pytest.approx(0, abs=0.02)


def test_log_prob_gap_compares_sampled_tokens(rollout_load: ModuleType) -> None:
    """Engine samples at -0.5 and scores at -0.25. Scores of other tokens are NaN."""
    variant = SimpleNamespace(engine=Engine(0.0))
    load = build_load(rollout_load, variant.engine, Path("none"))
    load.stops = False

    async def gap() -> float | None:
        running = asyncio.create_task(load.run(2))
        while len(load.turns) < 5:
            await asyncio.sleep(0.01)
        load.stops = True
        await running
        return await rollout_load.log_prob_gap(variant, load.kept)

    assert asyncio.run(gap()) == 0.25
    assert len(load.kept) >= 2
    assert asyncio.run(rollout_load.log_prob_gap(variant, [])) is None


def test_variants_have_their_server_options(rollout_load: ModuleType) -> None:
    option = "--prefill-delayer-max-delay-passes"

    def passes(name: str) -> str:
        words = rollout_load.VARIANTS[name].arguments
        return words[words.index(option) + 1]

    waits = {"one_by_one": "1", "gathered": "16", "gathered_8": "8", "gathered_32": "32"}
    assert {name: passes(name) for name in waits} == waits
    assert passes("tuned") == passes("few_requests") == passes("broken_graphs") == "1"
    assert "2048" in rollout_load.VARIANTS["gathered_2048"].arguments
    assert "--cuda-graph-config" not in rollout_load.VARIANTS["few_requests"].arguments
