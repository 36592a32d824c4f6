"""One-line descriptions of a command's failure, and files with full tracebacks."""

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
"""Length limit of a message, because some libraries print whole tensors."""

PACKAGES = ("gptoss_kernels", "megatron_gptoss", "converters", "rl_loop", "launch")


@dataclass(frozen=True)
class ErrorReport:
    """The exception that made a command fail."""

    kind: str
    """Class name as "module.Class", or "Class" if it is built in."""

    message: str

    is_remote: bool
    """True if an actor's process raised the exception."""

    is_user_error: bool
    """True if the user can correct the cause, and the message says how."""

    notes: tuple[str, ...] = ()
    """Notes of the exception, such as the rank that failed first."""

    is_full_disk: bool = False
    """True if a disk or a quota is full, so that a traceback could not be written either."""


def explain(error: BaseException, directory: Path | None = None) -> str:
    """Return a description of ``error`` in one line.

    For a ``UserError`` of this process this is its message. For other errors the traceback is
    appended to ``error.log`` in ``directory``, and the line names the file. If this fails, a
    temporary file is used.
    """
    failure = describe_cause(error)
    if failure.is_full_disk:
        return f"{failure.message}. Free disk space, then continue with --resume"
    # The message of a user error is written for this place and already has a remedy.
    if failure.is_user_error and not failure.is_remote:
        return str(error)

    # Messages of libraries may have several lines.
    line = " ".join(failure.message.split())
    if len(line) > MAX_MESSAGE_CHARACTERS:
        line = f"{line[:MAX_MESSAGE_CHARACTERS]} ..."
    if failure.kind and not failure.is_user_error:
        class_name = failure.kind.rpartition(".")[2]
        line = f"{class_name}: {line}"
    if failure.notes:
        line += f" ({'; '.join(failure.notes)})"

    # Everything else may be a fault of this project, for which the traceback is needed.
    log = _write_traceback(error, directory)
    if log is None:
        return line
    return f"{line.removesuffix('.')}. The traceback is in {log}"


def describe_cause(error: BaseException) -> ErrorReport:
    """Describe the root cause of ``error``. Ray may wrap the exception of an actor."""
    notes = tuple(getattr(error, "__notes__", ()))
    cause = root_cause(error)

    # Ray keeps only the text of an exception in an actor's constructor. If Ray was never imported,
    # there are no actors.
    ray: Any = sys.modules.get("ray.exceptions")
    if ray is not None and isinstance(cause, ray.RayActorError) and cause.actor_init_failed:
        # The text is all there is, so the class is found by its name.
        kind, message = last_exception(str(cause))
        return ErrorReport(
            kind=kind,
            message=message,
            is_remote=True,
            is_user_error=_names_user_error(kind),
            notes=notes,
        )

    message = str(cause)
    # Subclasses such as RunWriteError have a message that names the file and a remedy.
    is_full_disk = type(cause) is OSError and cause.errno in (errno.ENOSPC, errno.EDQUOT)
    if isinstance(cause, OSError) and is_full_disk:
        message = ": ".join(filter(None, [str(cause.filename or ""), cause.strerror]))
    return ErrorReport(
        kind=_qualified_name(type(cause)),
        message=message,
        is_remote=cause is not error,
        is_user_error=isinstance(cause, UserError),
        notes=notes,
        is_full_disk=is_full_disk,
    )


def last_exception(text: str) -> tuple[str, str]:
    """Return class and message of the exception at the end of a traceback.

    The text before may contain other tracebacks.
    """
    # Ray colors the first line of an actor's traceback.
    without_colors = re.sub(r"\x1b\[[\d;]*m", "", text)
    lines = without_colors.strip().splitlines()

    # The exception follows the last frame. The frame's source and its marks are indented.
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    first = frames[-1] + 1 if frames else 0
    while first < len(lines) - 1 and lines[first].startswith(" "):
        first += 1

    kind, colon, message = "\n".join(lines[first:]).partition(": ")
    # A text without a class may contain a colon, too. Ray's classes have parentheses, such as
    # RayTaskError(ValueError).
    if not colon or not re.fullmatch(r"[\w.()]+", kind):
        return "", "\n".join(lines[first:])
    return kind, message


def _qualified_name(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _names_user_error(kind: str) -> bool:
    """Return True if ``kind``, "module.Class" from a traceback, is a subclass of ``UserError``."""
    module_name, _, class_name = kind.rpartition(".")
    module = sys.modules.get(module_name)
    if module is None and module_name.partition(".")[0] in PACKAGES:
        # This process may not have imported the module that failed in the actor.
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            return False
    candidate = getattr(module, class_name, None)
    return isinstance(candidate, type) and issubclass(candidate, UserError)


def _write_traceback(error: BaseException, directory: Path | None) -> Path | None:
    """Write the traceback to a file and return its path. None if no file can be written."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    command = " ".join(sys.argv)
    text = f"{when} {command}\n" + "".join(traceback.format_exception(error))

    if directory is not None and directory.is_dir():
        log = directory / "error.log"
        try:
            # Appended, because the tracebacks of earlier attempts may explain this one.
            with log.open("a") as file:
                file.write(f"{text}\n")
            return log
        except OSError:
            pass  # the disk may be full: try the temporary directory

    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="gptoss-error-", suffix=".log", delete=False
        ) as scratch:
            scratch.write(text)
        return Path(scratch.name)
    except OSError:
        return None
