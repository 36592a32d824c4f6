"""``python -m sglang.launch_server`` with the local server of the tests.

Tests start dozens, so it runs in a fork that has imported torch, if there is a server of forks.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent

if __name__ == "__main__":
    # The package of this module imports torch and Ray.
    sys.path.insert(0, str(HERE.parents[2] / "forked_workers"))
    from ask_for_fork import run_program

    run_program(str(HERE.parent / "serve.py"))
