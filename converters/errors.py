"""The error of every conversion, and what an error of the file system must say."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_gptoss.user_error import UserError


class ConversionError(UserError, ValueError):
    """Weights could not be read, converted or written.

    The message names the file, key or tensor and says what to do.
    """


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError from inside, which has no name if the file was open already."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
