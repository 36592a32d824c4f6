"""The error of every conversion, and what an error of the file system must say."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_gptoss.user_error import UserError


class ConversionError(UserError, ValueError):
    """Weights could not be read, converted or written. The message names the file, key or tensor and what to do."""


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """An OSError from inside names the file; one of an open file does not by itself."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
