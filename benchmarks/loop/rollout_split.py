"""Seconds of rollouts by activity of the servers, from their logs.

    python -m benchmarks.loop split --episodes 256 LOG [LOG ...]

``python -m benchmarks.loop CONFIG --out FILE`` prints the same table, and keeps the logs next to
FILE. The first rollout of every server compiles and is left out.

Prints the means over all servers and rollouts:

    full batch        decoding with at least 85% of the most requests that ran at a time
    partly full       decoding with 25% to 85%
    tail              decoding with less
    prefills          prefill batches, which stop decoding
    stalls            everything else, such as compilation

A log has the seconds of every 40 decoding steps, together with the prefills between them. The
seconds of a step depend on the number of running requests, those of a prefill batch on its
requests. A least-squares fit to all intervals separates them. Stalls are the remainder.

*Seconds outside* are the mean time of an episode between two turns, in which a rollout worker
parses, runs tools and renders: episodes that are neither running nor queued, over time, divided by
the turns that ended (Little's law). Only turns 3 to 5 count, when no episode has ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.sglang.server_log import (
    STEPS_PER_LINE,
    DecodeInterval,
    ServerRollout,
    server_rollouts,
)

FULL = 0.85
"""Smallest fraction of the most running requests that is a full batch."""
TAIL = 0.25
"""Largest fraction of the most running requests that is the tail."""
MIN_INTERVALS = 20
"""Smallest number of intervals to fit the times of steps and prefills to."""
STALL = 8.0
"""An interval whose excess is this many times the median excess contains a stall."""
FITS = 5
"""Number of fits. Each leaves out the outliers of the previous one."""
TURNS = (3, 5)
"""Turns whose seconds outside are measured, from the first of the one to the last of the other."""


@dataclass
class RolloutSplit:
    """Means over rollouts of servers. Times are seconds."""

    rollouts: int
    """Number of rollouts."""
    total: float
    full: float
    partly: float
    tail: float
    prefill: float
    stalls: float
    prefill_batches: float
    prefill_requests: float
    eager_prefills: float
    """Prefill batches without a CUDA graph."""
    outside: float | None
    """Seconds of an episode outside the server per turn. None if no rollout has enough turns."""

    def table(self) -> list[str]:
        """Return the lines of a Markdown table."""
        outside = "-" if self.outside is None else f"{self.outside:.2f}"
        rows = [
            ("server, from first to last decoding step, s", f"{self.total:.1f}"),
            *(
                (title, f"{seconds:.1f} ({seconds / self.total:.0%})")
                for title, seconds in (
                    ("decoding, full batch", self.full),
                    ("decoding, partly full", self.partly),
                    ("decoding, tail", self.tail),
                    ("prefills", self.prefill),
                    ("stalls", self.stalls),
                )
            ),
            (
                "prefill batches; their requests; without a graph",
                f"{self.prefill_batches:,.0f}; {self.prefill_requests:,.0f}; "
                f"{self.eager_prefills:,.1f}",
            ),
            (f"seconds outside per turn, turns {TURNS[0]} to {TURNS[1]}", outside),
        ]
        head = f"| servers' logs, mean of {self.rollouts} rollouts | |"
        return [head, "|---|---|", *(f"| {title} | {value} |" for title, value in rows), ""]


def main() -> None:
    """Print the split of the given logs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="output of a server")
    parser.add_argument("--episodes", type=int, required=True, help="of a server in a rollout")
    parser.add_argument("--skip", type=int, default=1, help="first rollouts to leave out")
    options = parser.parse_args()

    logs = [path.read_text(errors="replace") for path in options.logs]
    split = split_rollouts(logs, options.episodes, options.skip)
    if split is None:
        raise SystemExit(
            "LOG: too few lines about decoding after the first rollout. Pass --skip 0 for a run of "
            "one step"
        )
    print("\n".join(split.table()))


def split_rollouts(logs: Sequence[str], episodes: float, skip: int = 1) -> RolloutSplit | None:
    """Return the mean split of the rollouts in the logs of a run's servers.

    Args:
        logs: output of each server.
        episodes: episodes of a server in a rollout.
        skip: first rollouts of every server to leave out.

    Returns:
        The split. None if the logs have too few lines to measure the time of a decoding step.
    """
    return mean_split([part for log in logs for part in server_rollouts(log)[skip:]], episodes)


def mean_split(rollouts: Sequence[ServerRollout], episodes: float) -> RolloutSplit | None:
    """Return the mean split of some rollouts.

    Args:
        rollouts: rollouts of servers with the same settings.
        episodes: episodes of a server in a rollout.

    Returns:
        The split. None if the rollouts have too few lines to measure the time of a decoding step.
    """
    intervals = [interval for rollout in rollouts for interval in rollout.intervals]
    times = ServerTimes.fitted(intervals)
    if times is None:
        return None

    most = max(interval.running for interval in intervals)
    splits = [_split(rollout, times, most, episodes) for rollout in rollouts]
    outside = [split.outside for split in splits if split.outside is not None]
    means = {
        field.name: mean(getattr(split, field.name) for split in splits)
        for field in fields(RolloutSplit)
        if field.name not in ("rollouts", "outside")
    }
    return RolloutSplit(rollouts=len(splits), outside=mean(outside) if outside else None, **means)


@dataclass(frozen=True)
class ServerTimes:
    """Seconds of decoding steps and prefill batches of a server."""

    step: tuple[float, float, float]
    """Seconds of a decoding step: constant, per running request, per root of their number."""
    batch: tuple[float, float]
    """Seconds of a prefill batch: constant, per request."""

    @classmethod
    def fitted(cls, intervals: Sequence[DecodeInterval]) -> ServerTimes | None:
        """Fit the times to the seconds of intervals. None if there are too few.

        Intervals with a stall are outliers. They are left out of a second fit.
        """
        if len(intervals) < MIN_INTERVALS:
            return None
        terms = np.array([cls._terms(interval) for interval in intervals])
        seconds = np.array([interval.seconds for interval in intervals])

        # Few intervals have a stall, so most of them are shorter than this.
        is_usual = seconds < STALL * np.median(seconds)
        for _ in range(FITS):
            found = _non_negative_fit(terms[is_usual], seconds[is_usual])
            excess = seconds - terms @ found
            spread = np.median(np.abs(excess[is_usual]))
            is_usual = excess < STALL * max(spread, 1e-4)
        return cls(tuple(found[:3]), tuple(found[3:]))

    @staticmethod
    def _terms(interval: DecodeInterval) -> list[float]:
        """Return the factors of the times in the seconds of an interval."""
        requests = sum(prefill.requests for prefill in interval.prefills)
        steps = [1.0, interval.running, interval.running**0.5]
        return [*(STEPS_PER_LINE * term for term in steps), len(interval.prefills), requests]

    def decoding(self, interval: DecodeInterval) -> float:
        """Return the seconds of the decoding steps of an interval."""
        seconds = float(np.dot(self._terms(interval)[:3], self.step))
        return min(interval.seconds, seconds)

    def prefills(self, interval: DecodeInterval) -> float:
        """Return the seconds of the prefills of an interval."""
        seconds = float(np.dot(self._terms(interval)[3:], self.batch))
        return min(interval.seconds - self.decoding(interval), seconds)


def _non_negative_fit(terms: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return non-negative factors x, [terms], that nearly minimize |terms @ x - values|.

    Args:
        terms: [values, terms].
        values: [values].
    """
    factors = np.zeros(terms.shape[1])
    used = list(range(terms.shape[1]))
    while used:
        fit, *_ = np.linalg.lstsq(terms[:, used], values, rcond=None)
        if (fit >= 0).all():
            factors[used] = fit
            return factors
        # No activity takes negative seconds: fit again without the most negative term.
        del used[int(fit.argmin())]
    return factors


def _split(
    rollout: ServerRollout,
    times: ServerTimes,
    most: float,
    episodes: float,
) -> RolloutSplit:
    """Return the split of one rollout of one server. ``most``: most running requests."""
    decoding = {"full": 0.0, "partly": 0.0, "tail": 0.0}
    prefill = 0.0
    for interval in rollout.intervals:
        kind = "partly"
        if interval.running >= FULL * most:
            kind = "full"
        elif interval.running < TAIL * most:
            kind = "tail"
        decoding[kind] += times.decoding(interval)
        prefill += times.prefills(interval)

    total = sum(interval.seconds for interval in rollout.intervals)
    return RolloutSplit(
        rollouts=1,
        total=total,
        **decoding,
        prefill=prefill,
        stalls=total - prefill - sum(decoding.values()),
        prefill_batches=len(rollout.prefills),
        prefill_requests=sum(batch.requests for batch in rollout.prefills),
        eager_prefills=sum(not batch.has_graph for batch in rollout.prefills),
        outside=seconds_outside(rollout, episodes),
    )


def seconds_outside(rollout: ServerRollout, episodes: float) -> float | None:
    """Return the mean seconds of an episode outside the server per turn.

    Args:
        rollout: rollout of one server.
        episodes: episodes of the server, all of which are alive in turns 3 to 5.

    Returns:
        The seconds. None if the rollout has fewer turns.
    """
    first, last = TURNS
    admitted = 0
    begin_turns = 0
    ended_turns = 0
    area = 0.0
    before = None
    for batch in rollout.prefills:
        ended_turns = admitted - batch.running
        # ``before``: episodes outside since the previous batch.
        if before is None:
            begin_turns = ended_turns
        else:
            area += before * batch.seconds
        is_measured = (first - 1) * episodes <= ended_turns < last * episodes
        before = episodes - batch.running - batch.queued if is_measured else None
        admitted += batch.requests
        if ended_turns >= last * episodes:
            return area / (ended_turns - begin_turns)
    return None
