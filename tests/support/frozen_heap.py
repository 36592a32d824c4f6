"""Exempts modules and collected tests from garbage collection, and lets it run rarely."""

from __future__ import annotations

import gc


def keep_frozen() -> None:
    """Exempt all existing objects from garbage collection permanently.

    A trainer that leaves its process group collects all objects, after it has undone its own
    exemption (megatron_gptoss/distributed.py). The process of all tests has 800,000 objects before
    the first test, so that takes 0.6 s each time. The first trainer would also undo this exemption,
    so no other code may freeze or unfreeze.

    Garbage is not collected first. The collection of tests leaves a few megabytes of it, and the
    search for it would take 0.8 s.
    """
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    collect_rarely()


def collect_rarely() -> None:
    """Search for garbage 30 times less often than by default, also in forks of this process.

    With Python's defaults the search takes 13% of the processor time of tests that train models.
    """
    gc.set_threshold(20_000, 10, 10)
