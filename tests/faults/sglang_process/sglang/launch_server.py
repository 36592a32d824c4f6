"""``python -m sglang.launch_server`` with a server that samples from the policy."""

from tests.faults.server import main

if __name__ == "__main__":
    main()
