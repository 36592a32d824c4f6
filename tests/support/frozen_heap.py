"""Exempts modules and collected tests from garbage collection, and lets it run rarely."""

from __future__ import annotations

import gc

from rl_loop.process_memory import collect_rarely


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
