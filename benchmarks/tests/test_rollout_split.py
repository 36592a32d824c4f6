"""Seconds of rollouts by activity, read from the log of a simulated server."""

from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.loop.rollout_split import split_rollouts
from benchmarks.sglang.server_log import STEPS_PER_LINE, server_rollouts
from tests.support.forked_workers import forked_python

ROOT = Path(__file__).parents[2]
EPISODES = 64
TURNS = 7
BATCH_SECONDS = 0.009
REQUEST_SECONDS = 0.0004
STALL_SECONDS = 1.5
OUTSIDE_SECONDS = 0.25
"""Mean seconds of an episode between two turns."""


def step_seconds(running: int) -> float:
    return 0.002 + 0.00006 * running


@dataclass
class SimulatedServer:
    """Writes the lines of SGLang 0.5.17 and adds up the seconds of every activity."""

    random: random.Random
    lines: list[str] = field(default_factory=list)
    clock: float = 0.0
    eager: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    last_decode: float = 0.0
    last_prefill: float = 0.0
    has_decode_line: bool = False

    def spend(self, kind: str, seconds: float) -> None:
        self.clock += seconds
        # A rollout begins with its first line about decoding.
        if self.has_decode_line:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def prefill(self, requests: int, running: int) -> None:
        self.spend("prefill", BATCH_SECONDS + REQUEST_SECONDS * requests)
        tokens = 13 * requests
        speed = tokens / (self.clock - self.last_prefill)
        self.last_prefill = self.clock
        has_graph = requests <= 16
        self.eager += not has_graph
        self.lines.append(
            f"[2026-11-28 10:00:00] Prefill batch, #new-seq: {requests}, #new-token: {tokens}, "
            f"#cached-token: 900, full token usage: 0.01, swa token usage: 0.02, #running-req: "
            f"{running}, #queue-req: 0, #pending-token: 0, cuda graph: {has_graph}, input "
            f"throughput (token/s): {speed:.4f}"
        )

    def decode_line(self, running: int, tokens: int) -> None:
        speed = tokens / (self.clock - self.last_decode)
        self.last_decode = self.clock
        self.has_decode_line = True
        self.lines.append(
            f"[2026-11-28 10:00:00] Decode batch, #running-req: {running}, #full token: 9000, full "
            f"token usage: 0.01, cuda graph: True, gen throughput (token/s): {speed:.4f}, "
            "#queue-req: 0"
        )

    def rollout(self, stall_at: int | None) -> None:
        """Run all turns of all episodes. One stall follows the line of number ``stall_at``."""
        self.lines.append("[2026-11-28 10:00:00] Cache flushed successfully!")
        self.seconds = {}
        self.eager = 0
        self.has_decode_line = False
        left = {number: TURNS for number in range(EPISODES)}
        back_at = dict.fromkeys(left, self.clock)
        running: dict[int, int] = {}
        steps = tokens = decode_lines = 0
        while left:
            arrived = [number for number in left if back_at.get(number, 1e9) <= self.clock]
            if arrived:
                self.prefill(len(arrived), len(running))
                for number in arrived:
                    del back_at[number]
                    running[number] = self.random.randint(150, 230)
            if not running:
                # Decoding lines of an empty server would hide the time that it waits.
                self.clock = min(back_at.values())
                continue

            kind = "full" if len(running) >= 0.85 * EPISODES else "partly"
            self.spend(
                "tail" if len(running) < 0.25 * EPISODES else kind, step_seconds(len(running))
            )
            steps += 1
            tokens += len(running)
            if steps % STEPS_PER_LINE == 0:
                if decode_lines == stall_at:
                    self.spend("stalls", STALL_SECONDS)
                self.decode_line(len(running), tokens)
                tokens = 0
                decode_lines += 1
            for number in list(running):
                running[number] -= 1
                if running[number] == 0:
                    del running[number]
                    left[number] -= 1
                    back_at[number] = self.clock + OUTSIDE_SECONDS * self.random.uniform(0.5, 1.5)
                    if left[number] == 0:
                        del left[number], back_at[number]


@pytest.fixture(scope="module")
def server() -> SimulatedServer:
    """Return a server after a warm-up and one measured rollout with a stall."""
    server = SimulatedServer(random.Random(0))
    server.rollout(stall_at=3)
    server.rollout(stall_at=9)
    return server


def test_split_equals_the_simulated_seconds(server: SimulatedServer) -> None:
    split = split_rollouts(["\n".join(server.lines)], EPISODES)
    assert split is not None
    assert split.rollouts == 1

    expected = server.seconds
    assert split.total == pytest.approx(sum(expected.values()), rel=0.05)
    assert split.full == pytest.approx(expected["full"], rel=0.15)
    assert split.full + split.partly == pytest.approx(
        expected["full"] + expected["partly"], rel=0.1
    )
    assert split.tail == pytest.approx(expected["tail"], abs=0.2)
    assert split.prefill == pytest.approx(expected["prefill"], rel=0.2)
    assert split.stalls == pytest.approx(STALL_SECONDS, rel=0.2)
    assert split.eager_prefills == server.eager > 0
    assert split.outside == pytest.approx(OUTSIDE_SECONDS, rel=0.2)


def test_program_prints_the_table_and_skips_the_warm_up(
    server: SimulatedServer, tmp_path: Path
) -> None:
    log = tmp_path / "server_0.log"
    log.write_text("\n".join(server.lines))
    program = [*forked_python(), "-m", "benchmarks.loop", "split", "--episodes", str(EPISODES)]
    done = subprocess.run([*program, str(log)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mean of 1 rollouts" in done.stdout
    assert f"; {EPISODES * TURNS:,}; " in done.stdout

    log.write_text("no line of a server\n")
    done = subprocess.run([*program, str(log)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "LOG: too few lines about decoding" in done.stderr


def test_rollouts_begin_at_weight_syncs(server: SimulatedServer) -> None:
    warm_up, measured = server_rollouts("\n".join(["#running-req: 1", *server.lines]))
    for rollout in (warm_up, measured):
        assert sum(batch.requests for batch in rollout.prefills) == EPISODES * TURNS
