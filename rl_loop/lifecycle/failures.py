"""What a command says of a failure: the cause on one line, and where the whole traceback is."""

import errno
import re
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST = 2000
"""Characters of a message; some libraries put whole tensors into theirs."""


@dataclass(frozen=True)
class Failure:
    """The exception that made a command fail."""

    kind: str
    """Its class, as "module.Class"; of a built-in one "Class"."""
    message: str
    is_remote: bool
    """It was raised in the process of an actor."""
    notes: tuple[str, ...] = ()
    """Such as the rank that failed first."""
    is_full_disk: bool = False
    """It says that a disk or a quota is full, and not where that was noticed: there is no room for a traceback."""


def find_cause(error: BaseException) -> Failure:
    """The exception at the root of ``error``: that of the actor where Ray passes one on."""
    notes = tuple(getattr(error, "__notes__", ()))
    cause = error
    # without Ray there are no actors, and its exceptions need not be imported
    ray: Any = sys.modules.get("ray.exceptions")
    if ray is not None:
        while isinstance(cause, ray.RayTaskError) and isinstance(cause.cause, BaseException) and cause.cause != cause:
            cause = cause.cause
        if isinstance(cause, ray.RayActorError) and cause.actor_init_failed:
            kind, message = last_exception(str(cause))
            return Failure(kind, message, is_remote=True, notes=notes)
    kind = type(cause).__qualname__
    if type(cause).__module__ != "builtins":
        kind = f"{type(cause).__module__}.{kind}"
    message, is_full_disk = str(cause), False
    if type(cause) is OSError and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        message = ": ".join(filter(None, [str(cause.filename or ""), cause.strerror]))
        is_full_disk = True
    return Failure(kind, message, is_remote=cause is not error, notes=notes, is_full_disk=is_full_disk)


def last_exception(text: str) -> tuple[str, str]:
    """(class, message) of the exception that a traceback ends with, however often another one is quoted before it."""
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    first = frames[-1] + 1 if frames else 0
    while first < len(lines) - 1 and lines[first].startswith(" "):
        first += 1
    kind, colon, message = "\n".join(lines[first:]).partition(": ")
    if not colon or not re.fullmatch(r"[\w.()]+", kind):
        return "", "\n".join(lines[first:])
    return kind, message


def explain(error: BaseException, users: tuple[type[BaseException], ...], directory: Path | None = None) -> str:
    """One line about ``error``. ``users`` are the classes whose message says what the user can do; of any other, and of
    all that comes from an actor, the traceback is written to ``error.log`` in ``directory`` or, where that is not
    possible, to a temporary file, which the line names."""
    failure = find_cause(error)
    if failure.is_full_disk:
        return f"{failure.message}: make room, then add --resume"
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in users}
    is_users = isinstance(error, users) or failure.kind in names
    if is_users and not failure.is_remote:
        return str(error)
    line = " ".join(failure.message.split())
    if len(line) > LONGEST:
        line = f"{line[:LONGEST]} ..."
    if not is_users:
        line = f"{failure.kind.rpartition('.')[2]}: {line}" if failure.kind else line
    if failure.notes:
        line += f" ({'; '.join(failure.notes)})"
    log = _write_traceback(error, directory)
    return f"{line}; the traceback is in {log}" if log else line


def _write_traceback(error: BaseException, directory: Path | None) -> Path | None:
    """Where the traceback is now; None if there is no room for it anywhere."""
    text = time.strftime("%Y-%m-%d %H:%M:%S ") + " ".join(sys.argv) + "\n" + "".join(traceback.format_exception(error))
    if directory is not None and directory.is_dir():
        try:
            log = directory / "error.log"
            with log.open("a") as file:
                file.write(f"{text}\n")
            return log
        except OSError:
            pass
    try:
        with tempfile.NamedTemporaryFile("w", prefix="gptoss-error-", suffix=".log", delete=False) as scratch:
            scratch.write(text)
        return Path(scratch.name)
    except OSError:
        return None
