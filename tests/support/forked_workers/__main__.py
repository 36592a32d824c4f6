"""Runs a Python program like ``python``, but the Ray that it starts forks its workers.

python -m tests.support.forked_workers [-m MODULE | FILE] ARGUMENT...
"""

import runpy
import sys
from pathlib import Path

from tests.support.forked_workers import forking_workers

if __name__ == "__main__":
    _, *sys.argv = sys.argv
    with forking_workers():
        if sys.argv[0] == "-m":
            _, *sys.argv = sys.argv
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
