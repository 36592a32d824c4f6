"""Commands that run as an ordinary user, if root runs the tests."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def as_ordinary_user() -> list[str]:
    """Return a command prefix that switches from root to uid 1000.

    The prefix makes the interpreter's folders readable. It is empty for an ordinary user.
    """
    if os.geteuid() != 0:
        return []
    needed = [
        Path(sys.base_prefix),
        Path(sys.prefix),
        Path(sys.prefix).resolve(),
        Path(__file__).parents[4],
    ]
    view = ["bwrap", "--dev-bind", "/", "/", "--cap-add", "ALL"]
    opened: set[Path] = set()
    for path in needed:
        for parent in [*reversed(path.parents)]:
            closed = not parent.stat().st_mode & 0o001
            if closed and not any(parent.is_relative_to(other) for other in opened):
                view += ["--tmpfs", str(parent)]
                opened.add(parent)
            elif any(parent.is_relative_to(other) for other in opened):
                view += ["--dir", str(parent)]
        if any(path.is_relative_to(other) for other in opened):
            view += ["--ro-bind", str(path), str(path)]
    return [
        *view,
        shutil.which("setpriv") or "setpriv",
        "--reuid=1000",
        "--regid=1000",
        "--clear-groups",
    ]
