"""Random tokens that only the user of a run can read, and Ray's authentication by such a token.

Ray checks the token on every request between its parts. It learns the path of the token's file from
the environment, so the token itself is in no environment and on no command line."""

import os
import secrets
import stat
from pathlib import Path
from typing import Any

from megatron_gptoss.user_error import UserError

TOKEN_BYTES = 32


class NotPrivate(UserError):
    """A directory that must be private belongs to another user, or others may enter it."""


def private_directory(path: Path) -> Path:
    """Create a directory that only this user may enter, or check that an existing one is.

    Raises:
        NotPrivate: if another user owns ``path``, or it is a link or a file.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Another user may have made it first in a directory such as /tmp, to read the files in it.
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise NotPrivate(
            f"{path}: is not a directory of this user (owner {found.st_uid}). Have it removed, or "
            "set RAY_TMPDIR to a directory of your own"
        )
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def write_token(path: Path) -> str:
    """Write a new random token to a file with mode 0600, and return the token."""
    token = secrets.token_hex(TOKEN_BYTES)
    # A file from before may have another mode, or be open in another process.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        file.write(token)
    return token


def ray_token_environment(token: Path) -> dict[str, str]:
    """Return the variables that make every part of Ray require the token in this file."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


def require_ray_token(token: Path) -> None:
    """Make the Ray that starts in this process, and all that it starts, require a token."""
    # imported here so that a node of a job is checked before anything of Ray is loaded
    import ray

    raylet: Any = ray._raylet  # has no types
    os.environ.pop("RAY_AUTH_TOKEN", None)  # would be used instead of the file
    os.environ.update(ray_token_environment(token))
    # Ray has read both when it was imported, or for an earlier Ray of this process.
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    raylet.Config.initialize("")
