"""Errors of conversions and weight gathering, and checks that raise them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_gptoss.new_directory import is_partial, old_name
from megatron_gptoss.user_error import UserError


class ConversionError(UserError, ValueError):
    """Weights could not be read, converted or written.

    The message names the file, key or tensor and the remedy.
    """


class GatheringAbortedError(RuntimeError):
    """A rank cannot take part in gathering weights. All ranks have stopped and may try again.

    The message names the rank.
    """


class GatheringError(RuntimeError):
    """Sending weights between ranks failed. The process group can no longer be used."""


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Set the file name of an OSError that the block raises.

    Errors of reading an open file do not contain it.
    """
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def check_not_partial(path: Path) -> None:
    """Raise ConversionError if ``path`` is the name of an unfinished directory."""
    if is_partial(path):
        raise ConversionError(
            f"{path}: unfinished directory. It is being written, or was left by a killed process "
            "and can be deleted"
        )


def check_directory_exists(path: Path, expected: str) -> None:
    """Raise ConversionError if ``path`` is not a directory.

    Args:
        path: directory to check.
        expected: expected contents, for the error.
    """
    if path.is_dir():
        return
    # Replacing a directory renames the old version first. A process that is killed between the two
    # renames leaves only the old version, under another name.
    old = old_name(path)
    if old.is_dir():
        raise ConversionError(
            f"{path}: no such directory. {old} is its previous version, left by a process that was "
            "killed while replacing it. Rename that directory, or write this one again"
        )
    raise ConversionError(f"{path}: no such directory; expected {expected}")


def count_tensors(names: list[str]) -> str:
    """Return the first tensor name and the number of others, as the subject of a sentence."""
    if len(names) == 1:
        return f"tensor {names[0]} is"
    return f"tensor {names[0]} and {len(names) - 1} more are"
