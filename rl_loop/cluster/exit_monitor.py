"""Watches a process and prints a message when it exits.

    python exit_monitor.py PIDFD MESSAGE

Runs separately, because the observer may be killed together with the watched process: when a raylet
dies, Ray's C++ code ends the driver within milliseconds. A thread of the driver might not print in
time. Standard input is a pipe from the observer. If it closes while the watched process lives, the
program exits silently.
"""

import os
import select
import sys


def main() -> None:
    watched, message = int(sys.argv[1]), sys.argv[2]
    # If both have ended, print the message: the death of the process may have ended the observer.
    ended, _, _ = select.select([watched, sys.stdin.fileno()], [], [])
    if watched in ended:
        os.write(sys.stderr.fileno(), f"{message}\n".encode())


if __name__ == "__main__":
    main()
