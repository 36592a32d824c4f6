"""Decoding and prefills from the logs of SGLang servers (0.5.17, log level info)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

STEPS_PER_LINE = 40
"""Decoding steps between two lines about decoding (``--decode-log-interval``)."""
MIN_LINES = 10
"""Smallest number of lines about decoding in a rollout. Warm-ups and tests of a server have fewer."""

DECODE_LINE = re.compile(r"#running-req: (\d+).*gen throughput \(token/s\): ([0-9.]+)")
PREFILL_LINE = re.compile(
    r"Prefill batch.*?#new-seq: (\d+), #new-token: (\d+).*#running-req: (\d+), #queue-req: (\d+)"
    r".*cuda graph: (\w+), input throughput \(token/s\): ([0-9.]+)"
)
SYNC_LINE = "Cache flushed"
"""Text of a line that a weight sync writes at its end."""


@dataclass(frozen=True)
class Prefill:
    """One prefill batch."""

    requests: int
    """Requests of the batch."""
    tokens: int
    """Tokens of the batch that were not in the prefix cache."""
    running: int
    """Requests that were decoding before the batch."""
    queued: int
    """Requests that wait after the batch."""
    has_graph: bool
    """True if the batch ran as a CUDA graph."""
    seconds: float
    """Seconds since the previous prefill batch of the server."""


@dataclass(frozen=True)
class DecodeInterval:
    """The decoding steps between two lines about decoding, and the prefills among them."""

    running: float
    """Requests that were decoding, on average."""
    seconds: float
    prefills: tuple[Prefill, ...]


@dataclass(frozen=True)
class ServerRollout:
    """One rollout of one server, from a weight sync to the next."""

    intervals: tuple[DecodeInterval, ...]
    prefills: tuple[Prefill, ...]


def decode_speeds(log: str) -> list[tuple[int, float]]:
    """Return running requests and tokens per second of every line about decoding."""
    return [(int(found[1]), float(found[2])) for found in DECODE_LINE.finditer(log)]


def step_seconds(log: str, running: int) -> list[float]:
    """Return the seconds of a decoding step with ``running`` requests, for every line about it.

    A line includes the time since the previous line, such as prefills or idle time. Therefore,
    lines with less than half of the highest speed are left out.

    Args:
        log: output of the server.
        running: number of running requests.
    """
    speeds = [speed for requests, speed in decode_speeds(log) if requests == running]
    return [running / speed for speed in speeds if speed > max(speeds) / 2]


def server_rollouts(log: str) -> list[ServerRollout]:
    """Return the rollouts of a server in their order.

    Args:
        log: output of the server. A weight sync begins every rollout.
    """
    parts: list[list[str]] = []
    for line in log.splitlines():
        if SYNC_LINE in line:
            parts.append([])
        elif parts:
            parts[-1].append(line)

    rollouts = [read_rollout(lines) for lines in parts]
    return [rollout for rollout in rollouts if len(rollout.intervals) >= MIN_LINES]


def read_rollout(lines: Sequence[str], steps_per_line: int = STEPS_PER_LINE) -> ServerRollout:
    """Return the decoding steps and prefills of some lines of a server's output.

    Args:
        lines: the lines.
        steps_per_line: decoding steps between two lines about decoding.
    """
    intervals: list[DecodeInterval] = []
    prefills: list[Prefill] = []
    since_last: list[Prefill] = []
    last_running: int | None = None
    for line in lines:
        if found := PREFILL_LINE.search(line):
            prefill = _read_prefill(found)
            prefills.append(prefill)
            since_last.append(prefill)
        elif found := DECODE_LINE.search(line):
            running = int(found[1])
            # The interval of the first line began before the rollout.
            if last_running is not None:
                counts = [last_running, *(prefill.running for prefill in since_last), running]
                # The speed is the number of tokens over the seconds, and every running request
                # samples a token in each step.
                mean = sum(counts) / len(counts)
                seconds = steps_per_line * mean / float(found[2])
                intervals.append(DecodeInterval(mean, seconds, tuple(since_last)))
            since_last = []
            last_running = running
    return ServerRollout(tuple(intervals), tuple(prefills))


def _read_prefill(found: re.Match[str]) -> Prefill:
    requests, tokens, running, queued = (int(number) for number in found.groups()[:4])
    speed = float(found[6])
    # The speed is the number of tokens over the seconds since the previous line. It is exact,
    # where the time stamps of the lines have whole seconds.
    seconds = tokens / speed if speed > 0 else 0.0
    return Prefill(requests, tokens, running, queued, found[5] == "True", seconds)
