"""What a command says about a failure: its cause in one line, and where the full traceback is."""

import errno
import importlib
import re
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gptoss.user_error import UserError
from rl_loop.infrastructure import root_cause

MAX_MESSAGE_CHARACTERS = 2000
"""Some libraries put whole tensors into their messages."""

PACKAGES = ("gptoss_kernels", "megatron_gptoss", "converters", "rl_loop", "launch")


@dataclass(frozen=True)
class Failure:
    """The exception that made a command fail."""

    kind: str
    """Its class, as "module.Class"; that of a built-in one as "Class"."""

    message: str

    is_remote: bool
    """It was raised in the process of an actor."""

    is_user_error: bool
    """The user can mend it, and the message says how."""

    notes: tuple[str, ...] = ()
    """Such as the rank that failed first."""

    is_full_disk: bool = False
    """A disk or a quota is full, and no code of ours noticed where: there is no room for a
    traceback."""


def explain(error: BaseException, directory: Path | None = None) -> str:
    """Describe ``error`` in one line.

    A ``UserError`` of this process is its message. For everything else the traceback is written to
    ``error.log`` in ``directory`` or, where that is not possible, to a temporary file, and the
    line names that file."""
    failure = find_cause(error)
    if failure.is_full_disk:
        return f"{failure.message}: make room, then add --resume"
    if failure.is_user_error and not failure.is_remote:
        return str(error)

    line = " ".join(failure.message.split())
    if len(line) > MAX_MESSAGE_CHARACTERS:
        line = f"{line[:MAX_MESSAGE_CHARACTERS]} ..."
    if failure.kind and not failure.is_user_error:
        class_name = failure.kind.rpartition(".")[2]
        line = f"{class_name}: {line}"
    if failure.notes:
        line += f" ({'; '.join(failure.notes)})"

    log = _write_traceback(error, directory)
    if log is None:
        return line
    return f"{line}; the traceback is in {log}"


def find_cause(error: BaseException) -> Failure:
    """Find the exception at the root of ``error``: the actor's own where Ray passes one on."""
    notes = tuple(getattr(error, "__notes__", ()))
    cause = root_cause(error)

    # of an actor that failed in its constructor Ray keeps the text only; without Ray there are no
    # actors, and its exceptions need not be imported
    ray: Any = sys.modules.get("ray.exceptions")
    if ray is not None and isinstance(cause, ray.RayActorError) and cause.actor_init_failed:
        kind, message = last_exception(str(cause))
        return Failure(
            kind=kind,
            message=message,
            is_remote=True,
            is_user_error=_names_user_error(kind),
            notes=notes,
        )

    message = str(cause)
    is_full_disk = type(cause) is OSError and cause.errno in (errno.ENOSPC, errno.EDQUOT)
    if isinstance(cause, OSError) and is_full_disk:
        message = ": ".join(filter(None, [str(cause.filename or ""), cause.strerror]))
    return Failure(
        kind=_qualified_name(type(cause)),
        message=message,
        is_remote=cause is not error,
        is_user_error=isinstance(cause, UserError),
        notes=notes,
        is_full_disk=is_full_disk,
    )


def last_exception(text: str) -> tuple[str, str]:
    """Return class and message of the exception that a traceback ends with, whatever it quotes
    before that."""
    without_colours = re.sub(r"\x1b\[[\d;]*m", "", text)
    lines = without_colours.strip().splitlines()

    # the exception follows the last frame, whose source and its marks are indented
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    first = frames[-1] + 1 if frames else 0
    while first < len(lines) - 1 and lines[first].startswith(" "):
        first += 1

    kind, colon, message = "\n".join(lines[first:]).partition(": ")
    if not colon or not re.fullmatch(r"[\w.()]+", kind):
        return "", "\n".join(lines[first:])
    return kind, message


def _qualified_name(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _names_user_error(kind: str) -> bool:
    """Whether "module.Class", read in a traceback, is a class of ``UserError``."""
    module_name, _, class_name = kind.rpartition(".")
    module = sys.modules.get(module_name)
    if module is None and module_name.partition(".")[0] in PACKAGES:
        # this process may never have needed the module that failed in the actor
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            return False
    candidate = getattr(module, class_name, None)
    return isinstance(candidate, type) and issubclass(candidate, UserError)


def _write_traceback(error: BaseException, directory: Path | None) -> Path | None:
    """Write the traceback to a file and return its path, or None if there is no room for it
    anywhere."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    command = " ".join(sys.argv)
    text = f"{when} {command}\n" + "".join(traceback.format_exception(error))

    if directory is not None and directory.is_dir():
        log = directory / "error.log"
        try:
            with log.open("a") as file:
                file.write(f"{text}\n")
            return log
        except OSError:
            pass  # such as a full disk: try the temporary directory

    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="gptoss-error-", suffix=".log", delete=False
        ) as scratch:
            scratch.write(text)
        return Path(scratch.name)
    except OSError:
        return None
