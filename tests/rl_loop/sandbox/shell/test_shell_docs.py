"""The example of docs/shell.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_example_of_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "shell.md").read_text()
    ((program, expected),) = re.findall(
        r"^```python\n(.*?)^```\n\n```\n(.*?)^```", page, re.M | re.S
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )
    assert (done.stdout, done.stderr) == (expected, "")
