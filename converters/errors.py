"""Errors of conversions and of gathering weights, and checks that raise them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_gptoss.user_error import UserError


class ConversionError(UserError, ValueError):
    """Weights could not be read, converted or written.

    The message names the file, key or tensor and says what to do.
    """


class GatheringRefused(RuntimeError):
    """A rank cannot take part in gathering the weights; every rank has left it and may try again.

    The message names the rank.
    """


class GatheringBroken(RuntimeError):
    """A message of weights between ranks failed: these ranks can exchange no more messages."""


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError from inside, which has no name if the file was open already."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def count_tensors(names: list[str]) -> str:
    """Name the first tensor and count the others, as the subject of a sentence."""
    if len(names) == 1:
        return f"tensor {names[0]} is"
    return f"tensor {names[0]} and {len(names) - 1} more are"
