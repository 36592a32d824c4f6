"""Start of the trainer ranks' processes: size check, time limit and progress log."""

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from megatron_gptoss.user_error import UserError

logger = logging.getLogger(__name__)

RANKS_PER_CORE = 16
"""Maximum local ranks per core. Every rank imports torch and Megatron separately."""

START_SECONDS = 300.0
"""Time limit for the start of processes with a core for each, with a large margin. An idle machine
takes 10 s for torch and Megatron."""

SECONDS_PER_SHARED_RANK = 60.0
"""Additional time for every rank that a core has beyond its first."""

LOG_INTERVAL_SECONDS = 10.0
"""Interval of progress messages. Ranks that start faster log nothing."""


class RankStartError(UserError):
    """The processes of the trainer's ranks did not start.

    The message has the number of started ranks and a remedy.
    """


def check_local_ranks(ranks: int, cores: int) -> None:
    """Warn if local ranks share cores. Raise RankStartError above RANKS_PER_CORE."""
    if ranks > cores * RANKS_PER_CORE:
        raise RankStartError(
            f"parallel.world_size is {ranks}, but this machine has {cores} cores and no GPUs for "
            f"them. Set it to {cores} or less, or use `gptoss launch` for a cluster"
        )
    if ranks > cores:
        logger.warning(
            "%d trainer ranks share %d cores, which is slow. Set parallel.world_size=%d or less",
            ranks,
            cores,
            cores,
        )


def start_limit(ranks: int, cores: int) -> float:
    """Return the time limit in seconds for starting this number of ranks."""
    return START_SECONDS + SECONDS_PER_SHARED_RANK * max(0.0, ranks / cores - 1)


def wait_for_processes(calls: Sequence[Any], limit: float) -> None:
    """Wait until every rank's process has answered its first call or failed, and log the progress.

    Failures are raised where the results are read.

    Args:
        calls: object references, one per rank.
        limit: time limit in seconds.

    Raises:
        RankStartError: an answer is missing after ``limit``.
    """
    import ray

    began = last_log = time.monotonic()
    waiting = list(calls)
    while waiting:
        # A quarter of the interval, so that messages and the time limit are not late by more.
        _, waiting = ray.wait(
            waiting, num_returns=len(waiting), timeout=min(LOG_INTERVAL_SECONDS, limit) / 4
        )
        now = time.monotonic()
        started = len(calls) - len(waiting)
        if waiting and now - began > limit:
            raise RankStartError(
                f"{started} of {len(calls)} trainer ranks started within {limit:.0f} s (load "
                f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores). Use fewer ranks "
                "(parallel.world_size), or stop other processes on this machine"
            )
        if waiting and now - last_log >= LOG_INTERVAL_SECONDS:
            logger.info(
                "starting trainer ranks: %d of %d after %.0f s", started, len(calls), now - began
            )
            last_log = now
    if last_log > began:
        logger.info("all %d trainer ranks have started and load their weights", len(calls))
