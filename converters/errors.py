"""Errors of conversions and of gathering weights, and checks that raise them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_gptoss.new_directory import is_partial, old_name
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


def refuse_partial(path: Path) -> None:
    """Raise ConversionError if ``path`` has the name of a directory that was never finished."""
    if is_partial(path):
        raise ConversionError(
            f"{path}: unfinished; it is being written, or a process that was killed left it and "
            "it can be deleted"
        )


def refuse_missing(path: Path, expected: str) -> None:
    """Raise ConversionError if ``path`` is no directory; ``expected`` says what it should be."""
    if path.is_dir():
        return
    old = old_name(path)
    if old.is_dir():
        raise ConversionError(
            f"{path}: no such directory, but {old} is what it was before a process was killed while "
            "it replaced it; rename that one, or write it again"
        )
    raise ConversionError(f"{path}: no such directory; expected {expected}")


def count_tensors(names: list[str]) -> str:
    """Name the first tensor and count the others, as the subject of a sentence."""
    if len(names) == 1:
        return f"tensor {names[0]} is"
    return f"tensor {names[0]} and {len(names) - 1} more are"
