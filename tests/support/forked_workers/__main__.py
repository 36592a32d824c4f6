"""Runs a Python program like ``python``, but the Ray that it starts forks its workers.

python -m tests.support.forked_workers [-u] [-c CODE | -m MODULE | FILE] ARGUMENT...

``fork_program.py`` runs this file in a fork of the server.
"""

import atexit
import os
import runpy
import sys
import threading
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    if not __package__:  # this file was started by its path
        sys.path[0] = str(Path(__file__).parents[3])
    from tests.support.forked_workers import forking_workers

    _, *sys.argv = sys.argv
    if sys.argv[0] == "-u":  # an option of pytest-xdist, which flushes its streams anyway
        _, *sys.argv = sys.argv
    try:
        with forking_workers():
            if sys.argv[0] == "-m":
                _, *sys.argv = sys.argv
                sys.path[0] = os.getcwd()
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            elif sys.argv[0] == "-c":
                code = sys.argv.pop(1)
                sys.path[0] = ""
                main = sys.modules["__main__"] = ModuleType("__main__")
                exec(code, vars(main))
            else:
                sys.path[0] = str(Path(sys.argv[0]).parent)
                runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        # A fork ends without these steps of the interpreter.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
