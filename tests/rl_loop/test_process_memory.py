"""A driver keeps freed memory, and the garbage collector skips long-lived objects."""

import subprocess
import sys

import pytest

PROGRAM = """
import re, sys
from pathlib import Path
import numpy as np
from rl_loop.process_memory import keep_freed_memory

def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resident()
for megabytes in (64, 40, 90, 64, 90):
    column = np.ones(megabytes << 20, np.uint8)
    del column
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
@pytest.mark.parametrize(("how", "least", "most"), [("keep", 85, 140), ("return", 0, 20)])
def test_freed_columns_stay_in_the_process_only_if_configured(
    how: str, least: int, most: int
) -> None:
    """If freed memory is kept, only the largest column counts: smaller ones reuse its memory."""
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    assert least <= int(answer.stdout) <= most


GARBAGE = """
import gc, weakref
from rl_loop.process_memory import exempt_from_collection

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

gc.disable()
stays = [Node() for _ in range(1000)]
before = cycle()
exempt_from_collection()
assert before() is None, "what was garbage already is kept for ever"
assert gc.get_freeze_count() >= 1000
assert not any(found is stays[0] for found in gc.get_objects())
later = cycle()
gc.collect()
assert later() is None, "later garbage is not collected"
"""


def test_garbage_collector_skips_only_long_lived_objects() -> None:
    subprocess.run([sys.executable, "-c", GARBAGE], check=True)
