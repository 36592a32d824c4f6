"""Directories that appear complete or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from converters.errors import ConversionError
from megatron_gptoss.durable_files import exchange_names, sync_directory, sync_names

PARTIAL = ".partial"
"""Ends the name of a directory that is being written."""
OLD = ".old"
"""Ends the name of a directory that is being replaced."""


@contextmanager
def new_directory(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a directory to fill, which is renamed to ``final`` afterwards, or deleted on an error.

    All that it holds is on the disk before it has its name. With ``overwrite``, an earlier
    ``final`` is there until the new one is complete. Where the file system cannot exchange two
    names in one step, it is called ``final.old`` for a moment; what reads ``final`` then says so
    (``refuse_missing``).

    Raises:
        ConversionError: when ``final`` exists and ``overwrite`` is false; in place of an OSError
            from inside, with the file and the free space.
    """
    if final.exists() and not overwrite:
        raise ConversionError(f"{final}: exists already; delete it or choose another name")

    partial = final.with_name(final.name + PARTIAL)
    old = final.with_name(final.name + OLD)
    try:
        _restore(old, final)  # an earlier process may have been killed between the two renames
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial

        # A rename may reach the disk before the contents of the files that it makes visible.
        sync_directory(partial)
        if not (final.exists() and exchange_names(partial, final)):
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
                final.rename(old)
            partial.rename(final)
        sync_names(final.absolute().parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise _cannot_be_written(final, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _restore(old, final)


def final_name(partial: Path) -> Path:
    """Return the name that a directory of ``new_directory`` will get."""
    return partial.with_name(partial.name.removesuffix(PARTIAL))


def refuse_partial(path: Path) -> None:
    """Raise ConversionError if ``path`` has the name of a directory that was never finished."""
    if path.name.endswith(PARTIAL):
        raise ConversionError(
            f"{path}: unfinished; it is being written, or a process that was killed left it and "
            "it can be deleted"
        )


def refuse_missing(path: Path, expected: str) -> None:
    """Raise ConversionError if ``path`` is no directory; ``expected`` says what it should be."""
    if path.is_dir():
        return
    old = path.with_name(path.name + OLD)
    if old.is_dir():
        raise ConversionError(
            f"{path}: no such directory, but {old} is what it was before a process was killed while "
            "it replaced it; rename that one, or write it again"
        )
    raise ConversionError(f"{path}: no such directory; expected {expected}")


def _restore(old: Path, final: Path) -> None:
    if old.exists() and not final.exists():
        old.rename(final)


def _cannot_be_written(final: Path, error: OSError) -> ConversionError:
    parent = next(path for path in final.absolute().parents if path.exists())
    free_mib = shutil.disk_usage(parent).free >> 20
    return ConversionError(
        f"{error.filename or final}: cannot be written ({error.strerror or error}); {free_mib} MiB "
        f"are free in {parent}. {final} is as it was"
    )
