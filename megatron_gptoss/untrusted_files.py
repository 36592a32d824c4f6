"""Checks of names that come out of a file, which a stranger may have written."""

import os


def is_plain_name(name: object) -> bool:
    """Return whether ``name`` is that of a file in a directory, without a way out of it."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return os.path.basename(name) == name and "\0" not in name
