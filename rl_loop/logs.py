"""Logging of the command line and of actors: one line per event on standard error, plain or JSON.

Modules log with ``logging.getLogger(__name__)`` and configure nothing. A process that starts
others calls ``configure_logging`` once. The requested output of a command, such as a table or a
path, is not an event. It is printed to standard output.
"""

import json
import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from megatron_gptoss.user_error import UserError

FORMAT_VARIABLE = "GPTOSS_LOG"
LEVEL_VARIABLE = "GPTOSS_LOG_LEVEL"
FORMATS = ("plain", "json")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

PACKAGES = ("gptoss_kernels", "megatron_gptoss", "converters", "rl_loop", "launch")
"""Packages that log from the chosen level on. Other libraries log from WARNING on."""


@dataclass(frozen=True)
class LogSettings:
    """Log format and level of a process."""

    format: str = "plain"
    """One of FORMATS."""

    level: str = "INFO"
    """One of LEVELS: the minimum level of messages from PACKAGES."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "LogSettings":
        """Read GPTOSS_LOG and GPTOSS_LOG_LEVEL.

        Raises:
            UserError: a value is not allowed. The message names the variable and the allowed
                values.
        """
        chosen_format = environment.get(FORMAT_VARIABLE, "plain").lower()
        if chosen_format not in FORMATS:
            raise UserError(
                f"{FORMAT_VARIABLE} is {chosen_format!r}. Use one of {', '.join(FORMATS)}"
            )

        level = environment.get(LEVEL_VARIABLE, "INFO").upper()
        if level not in LEVELS:
            raise UserError(f"{LEVEL_VARIABLE} is {level!r}. Use one of {', '.join(LEVELS)}")
        return cls(chosen_format, level)


def configure_logging(settings: LogSettings | None = None) -> None:
    """Send all log messages of this process to standard error.

    A second call replaces the settings of the first.

    Args:
        settings: format and level. Default: the settings of the environment.

    Raises:
        UserError: a variable of the environment has a wrong value.
    """
    if settings is None:
        settings = LogSettings.from_environment()

    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if settings.format == "json" else PlainFormatter())

    root = logging.getLogger()
    # Keep the handlers of other programs. A second StderrHandler would print every line twice.
    for earlier in root.handlers[:]:
        if isinstance(earlier, StderrHandler):
            root.removeHandler(earlier)
    root.addHandler(handler)
    # The root logger keeps its level, WARNING, which applies to all other libraries.
    for package in PACKAGES:
        logging.getLogger(package).setLevel(settings.level)


def with_logging[T](actor: type[T]) -> type[T]:
    """Return a subclass for ``ray.remote`` whose instances configure logging first.

    The settings are those of this process.
    """
    # Stored in the class, because actors on another machine do not see the driver's environment.
    settings = LogSettings.from_environment()

    class LoggingActor(actor):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: object, **options: object) -> None:
            configure_logging(settings)
            super().__init__(*arguments, **options)

    # Ray names processes and log lines after the class.
    LoggingActor.__name__ = actor.__name__
    LoggingActor.__qualname__ = actor.__qualname__
    return LoggingActor


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stderr``.

    The progress display and ``keep_output_in_log`` replace the stream.
    """

    def __init__(self) -> None:
        # StreamHandler's constructor would keep the current stream.
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class PlainFormatter(logging.Formatter):
    """``2026-11-22 21:04:05 WARNING rl_loop.weight_sync.canary: message``, in local time."""

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
        )


class JsonFormatter(logging.Formatter):
    """One JSON object per line.

    Fields: time (UTC), level, module, message, host, pid and, for exceptions, traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "module": record.name,
            "message": record.getMessage(),
            "host": socket.gethostname(),
            "pid": record.process,
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)
