"""Programs in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_interpreted(module: str) -> None:
    """Run a module in a process whose Triton interprets kernels on the CPU.

    Args:
        module: name of a module in tests.support.kernels.

    Raises:
        AssertionError: the process failed. The message is its output.
    """
    result = subprocess.run(
        [sys.executable, "-m", f"tests.support.kernels.{module}"],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
