"""Starting the processes of trainer ranks: whether this machine has room for them, and
what is said meanwhile."""

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from megatron_gptoss.user_error import UserError

logger = logging.getLogger(__name__)

RANKS_PER_CORE = 16
"""More local ranks than this for each core are a mistake: every one of them imports torch and
Megatron by itself."""

START_SECONDS = 300.0
"""For processes to start on an idle machine with a core for each, with room to spare; torch and
Megatron take 10 s."""

SECONDS_PER_SHARED_RANK = 60.0
"""In addition for every rank that a core has beyond its first."""

NEWS_SECONDS = 10.0
"""Nothing is said of ranks that start faster than this, and nothing more often."""


class RankStartError(UserError):
    """The processes of the trainer's ranks did not come up; the message says how many
    did and what to change."""


def check_local_ranks(ranks: int, cores: int) -> None:
    """Warn if local ranks share cores; raise RankStartError if they are absurdly many."""
    if ranks > cores * RANKS_PER_CORE:
        raise RankStartError(
            f"parallel.world_size is {ranks}, and this machine has {cores} cores and no GPUs for them: use at most "
            f"{cores}, or `gptoss launch` for a cluster"
        )
    if ranks > cores:
        logger.warning(
            "%d trainer ranks share %d cores, which is slow; parallel.world_size=%d is not",
            ranks,
            cores,
            cores,
        )


def start_limit(ranks: int, cores: int) -> float:
    """Return the seconds that the processes of so many ranks may take to start."""
    return START_SECONDS + SECONDS_PER_SHARED_RANK * max(0.0, ranks / cores - 1)


def wait_for_processes(calls: Sequence[Any], limit: float) -> None:
    """Wait until every rank's process has answered its first call or failed, and log how many
    have.

    ``calls`` are object references, one per rank. Raises RankStartError if an answer is missing
    after ``limit`` seconds. Failures are left to who asks for the results."""
    import ray

    began = told = time.monotonic()
    waiting = list(calls)
    while waiting:
        _, waiting = ray.wait(
            waiting, num_returns=len(waiting), timeout=min(NEWS_SECONDS, limit) / 4
        )
        now = time.monotonic()
        started = len(calls) - len(waiting)
        if waiting and now - began > limit:
            raise RankStartError(
                f"{started} of {len(calls)} trainer ranks started within {limit:.0f} s (load {os.getloadavg()[0]:.0f} "
                f"on {os.cpu_count()} cores): use fewer ranks (parallel.world_size), or end what else runs here"
            )
        if waiting and now - told >= NEWS_SECONDS:
            logger.info(
                "starting trainer ranks: %d of %d after %.0f s", started, len(calls), now - began
            )
            told = now
    if told > began:
        logger.info("all %d trainer ranks have started; they load their weights", len(calls))
