"""Runs a Python program in a fork of the server. The program's Ray forks its workers, too.

    python fork_program.py [-u] [-c CODE | -m MODULE | FILE] ARGUMENT...

The fork gets the signals that end this program, and its status becomes the status of this program.
"""

import os
import signal
import sys
from pathlib import Path

from ask_for_fork import run_in_fork

MAIN = Path(__file__).with_name("__main__.py")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

if __name__ == "__main__":
    status = run_in_fork([str(MAIN), *sys.argv[1:]], FORWARDED)
    if status is None:
        sys.exit("there is no server of forks")
    if status < 0:  # a signal has ended the fork
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
