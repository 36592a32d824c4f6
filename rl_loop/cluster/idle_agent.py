"""Replaces Ray's dashboard agent: serves nothing, and exits with its raylet.

    python idle_agent.py [OPTION OF THE AGENT]...

A raylet starts an agent and exits if the agent does. Ray's agent takes a second of processor time
for its imports.
"""

import os
import select


def main() -> None:
    raylet = os.pidfd_open(os.getppid())
    select.select([raylet], [], [])


if __name__ == "__main__":
    main()
