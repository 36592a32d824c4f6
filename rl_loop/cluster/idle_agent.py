"""Replaces Ray's dashboard agent: serves nothing, and exits with its raylet.

    python idle_agent.py [OPTION OF THE AGENT]...

A raylet starts an agent, and exits if the agent exits. Ray's own agent needs a second of CPU time for
its imports.
"""

import os
import time

POLL_SECONDS = 0.5
INIT_PID = 1


def main() -> None:
    raylet = os.getppid()
    # The raylet may have died before this line. Then init is the parent, which never exits.
    while raylet != INIT_PID and os.getppid() == raylet:
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
