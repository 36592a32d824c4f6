"""Directories that appear whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from converters.errors import ConversionError
from megatron_gptoss.durable_files import sync_directory, sync_names

PARTIAL = ".partial"
"""Ends the name of a directory that is being written."""


@contextmanager
def new_directory(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """A directory to fill, which takes the name ``final`` when the block ends well and is deleted when it does not.

    All that it holds is on the disk before it has its name. An OSError inside becomes a ConversionError that names the
    file and the free space."""
    if final.exists() and not overwrite:
        raise ConversionError(f"{final}: exists already; delete it or choose another name")
    partial, old = final.with_name(final.name + PARTIAL), final.with_name(final.name + ".old")
    try:
        if old.exists() and not final.exists():  # killed between the two moves
            old.rename(final)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial

        sync_directory(partial)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        partial.rename(final)
        sync_names(final.absolute().parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        parent = next(p for p in final.absolute().parents if p.exists())
        free = shutil.disk_usage(parent).free >> 20
        raise ConversionError(
            f"{error.filename or final}: cannot be written ({error.strerror or error}); {free} MiB are free in "
            f"{parent}. {final} is as it was"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not final.exists():
            old.rename(final)


def final_name(partial: Path) -> Path:
    """What a directory of ``new_directory`` will be called."""
    return partial.with_name(partial.name.removesuffix(PARTIAL))


def refuse_partial(path: Path) -> None:
    """Raise ConversionError if ``path`` has the name of a directory that was never finished, nor checked."""
    if path.name.endswith(PARTIAL):
        raise ConversionError(
            f"{path}: unfinished; it is being written, or a process that was killed left it and it can be deleted"
        )
