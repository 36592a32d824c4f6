"""Keeping the garbage collector away from modules and collected tests."""

from __future__ import annotations

import gc


def keep_frozen() -> None:
    """Exempt all objects that there are from garbage collection for good.

    A trainer that leaves its process group has everything searched, after it has undone what it exempted itself
    (megatron_gptoss/distributed.py). In the process of all tests, which has 800,000 objects before the first of them,
    that takes 0.6 s each time. The first trainer would undo this too, so nothing else here freezes or unfreezes.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
