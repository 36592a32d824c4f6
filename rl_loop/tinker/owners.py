"""Keys of clients, and the owners that they stand for."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

KEY_PREFIX = "tml-"
"""Beginning of a key. The SDK refuses others."""


class Owners:
    """Owners by key. An owner does not see the models, checkpoints and samplers of others."""

    def __init__(self, keys: Sequence[str]) -> None:
        """Accept these keys."""
        self._owners = {key.encode(): owner_of(key) for key in keys}

    def find(self, key: str) -> str | None:
        """Return the owner of a key. None for an unknown key. The time does not depend on the key."""
        given = key.encode(errors="replace")
        found = None
        for known, owner in self._owners.items():
            if hmac.compare_digest(given, known):
                found = owner
        return found


def owner_of(key: str) -> str:
    """Return the name of a key's owner. The key cannot be computed from it."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def stored_key(file: Path) -> str:
    """Return the key of a file that only its owner can read, and create the file if it is missing.

    The key stays the same after a restart, because checkpoints belong to it.

    Raises:
        OSError: the file cannot be read or written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(KEY_PREFIX + secrets.token_urlsafe(32))
    try:
        # Fails if the file exists, so that a reader never sees a part of a key.
        os.link(new, file)
    except FileExistsError:
        pass
    finally:
        new.unlink()
    return file.read_text().strip()
