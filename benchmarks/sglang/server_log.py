"""Decoding speeds from the logs of SGLang servers."""

from __future__ import annotations

import re

DECODE_LINE = re.compile(r"#running-req: (\d+).*gen throughput \(token/s\): ([0-9.]+)")


def decode_speeds(log: str) -> list[tuple[int, float]]:
    """Return running requests and tokens per second of every line about decoding (40 steps)."""
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
