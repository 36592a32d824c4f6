"""Random tokens that only the user of a run can read, and Ray's token authentication.

Ray checks the token in every request between its processes. It reads the path of the token's file
from the environment, so the token itself is never in an environment or on a command line.
"""

import os
import secrets
import stat
from pathlib import Path
from typing import Any

from megatron_gptoss.user_error import UserError

TOKEN_BYTES = 32


class NotPrivateError(UserError):
    """A directory that must be private belongs to another user, or others may enter it."""


def private_directory(path: Path) -> Path:
    """Create a directory that only this user may enter, or check that an existing one is.

    Raises:
        NotPrivateError: if another user owns ``path``, or it is a link or a file.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    # In /tmp another user may have created the directory first, in order to read files in it.
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise NotPrivateError(
            f"{path} is not a directory of this user (owner {status.st_uid}). Ask its owner to "
            "remove it, or set RAY_TMPDIR to your own directory"
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def write_token(path: Path) -> str:
    """Write a new random token to a file with mode 0600, and return the token."""
    token = secrets.token_hex(TOKEN_BYTES)
    # An existing file may have another mode, or be open in another process.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        file.write(token)
    return token


def ray_token_environment(token: Path) -> dict[str, str]:
    """Return the variables that make every part of Ray require the token in this file."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


def require_ray_token(token: Path) -> None:
    """Require a token in the Ray that this process starts, and in all processes of that Ray."""
    # Imported here, because nodes of a job are checked before they load Ray.
    import ray

    raylet: Any = ray._raylet  # has no types
    # Ray would prefer this variable to the file.
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update(ray_token_environment(token))
    # Ray read both variables when it was imported, or when this process started an earlier Ray.
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    raylet.Config.initialize("")
