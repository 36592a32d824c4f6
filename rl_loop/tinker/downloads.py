"""Signed URLs of files, which programs without a key can download."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlencode

from rl_loop.tinker.errors import not_found
from rl_loop.tinker.store import CheckpointName, CheckpointStore

URL_SECONDS = 3600.0
"""Time in seconds for which a URL is valid."""


class Downloads:
    """Files of adapters in PEFT's format."""

    def __init__(self, store: CheckpointStore, prefix: str) -> None:
        """Serve files of ``store`` at paths that begin with ``prefix``."""
        self._store = store
        self._prefix = prefix
        self._secret = secrets.token_bytes(32)

    def sign(self, name: CheckpointName) -> tuple[float, dict[str, str]]:
        """Return paths of the files of a checkpoint.

        Returns:
            Time at which the paths expire, in seconds since the epoch, and paths by file.
        """
        expires = int(time.time() + URL_SECONDS)
        paths = {}
        for file in self._store.files(name):
            resource = f"{name.model_id}/{name.name}/{file}"
            query = urlencode({"expires": expires, "signature": self._sign(resource, str(expires))})
            paths[file] = f"{self._prefix}{quote(resource)}?{query}"
        return float(expires), paths

    def find(self, resource: str, query: Mapping[str, str]) -> Path:
        """Return the file of a signed path. Raises ApiError for any other path."""
        expires, signature = query.get("expires", ""), query.get("signature", "")
        is_signed = hmac.compare_digest(signature.encode(), self._sign(resource, expires).encode())
        # A signed time is a number.
        if not is_signed or int(expires) < time.time():
            raise not_found("there is no such file, or its URL has expired")
        model_id, checkpoint, file = resource.split("/")
        found = self._store.files(CheckpointName(model_id, "external_weights", checkpoint))
        if file not in found:
            raise not_found("the file was deleted")
        return found[file]

    def _sign(self, resource: str, expires: str) -> str:
        content = f"{resource}?{expires}".encode()
        return hmac.new(self._secret, content, hashlib.sha256).hexdigest()
