"""Memory that a driver has freed stays with it."""

import subprocess
import sys

import pytest

PROGRAM = """
import re, sys
from pathlib import Path
import numpy as np
from rl_loop.heap import keep_freed_memory

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
def test_freed_columns_stay_or_go(how: str, least: int, most: int) -> None:
    """The largest stays, and no more than that: columns of other sizes lie where it was."""
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    assert least <= int(answer.stdout) <= most
