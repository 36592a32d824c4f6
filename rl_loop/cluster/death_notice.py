"""Says that a process has died, for one that may have died of it.

    python death_notice.py PIDFD MESSAGE

A program of its own: when a raylet dies, Ray ends the driver within milliseconds from its C++, and
whether a thread of the driver could write a line first would be chance. Standard input is a pipe
from whoever wants to know; when it closes while the watched process lives, nothing is said.
"""

import os
import select
import sys


def main() -> None:
    watched, message = int(sys.argv[1]), sys.argv[2]
    # The end of what is watched counts also if the other side has died by then.
    ended, _, _ = select.select([watched, sys.stdin.fileno()], [], [])
    if watched in ended:
        os.write(sys.stderr.fileno(), f"{message}\n".encode())


if __name__ == "__main__":
    main()
