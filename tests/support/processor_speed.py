"""Limits of processor time that hold on slower machines, too."""

from __future__ import annotations

import json
import time

SECONDS_OF_SAMPLE = 0.0015
"""Processor time of `_sample` on the machine for which the limits of the tests are stated."""


def slowness() -> float:
    """Return how many times longer a computation takes here and now than where the limits are stated.

    The value is at least 1. Multiply a limit by it, right after the measurement: other programs share the caches and
    the cores of this machine, so its speed changes within seconds.
    """
    return max(1.0, min(_sample() for _ in range(5)) / SECONDS_OF_SAMPLE)


def _sample() -> float:
    """Return the processor time in seconds of strings, dictionaries and JSON."""
    began = time.thread_time()
    words = [f"word {number}" for number in range(4000)]
    counts: dict[str, int] = {}
    for word in words:
        counts[word[-2:]] = counts.get(word[-2:], 0) + 1
    assert json.loads(json.dumps([words, counts])) == [words, counts]
    return time.thread_time() - began
