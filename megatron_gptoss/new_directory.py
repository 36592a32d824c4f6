"""Directories that appear complete or not at all: checkpoints, conversions and exports.

A directory is written as ``NAME.partial`` and renamed when it is complete. If NAME exists already,
the two names are exchanged in one step. File systems that cannot exchange names (NFS) take two
renames; the earlier directory is called ``NAME.old`` between them.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_gptoss.durable_files import exchange_names, sync_directory, sync_names
from megatron_gptoss.user_error import UserError

PARTIAL = ".partial"
"""Suffix of a directory that is being written."""
OLD = ".old"
"""Suffix of a directory that is being replaced."""


class DirectoryError(UserError, RuntimeError):
    """A directory could not be written; the message names it and what to do."""


@contextmanager
def new_directory(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a directory to fill, which is published as ``final`` afterwards, or deleted on an error.

    With ``overwrite``, an earlier ``final`` stays until the new one is complete.

    Raises:
        DirectoryError: if ``final`` exists and ``overwrite`` is false; in place of an OSError from
            inside, with the file and the free space.
    """
    if final.exists() and not overwrite:
        raise DirectoryError(f"{final}: exists already; delete it or choose another name")

    partial = partial_name(final)
    try:
        restore(final)  # an earlier process may have been killed between two renames
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        publish(final)
    except OSError as error:
        raise _cannot_be_written(final, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish(final: Path) -> None:
    """Give the complete directory ``partial_name(final)`` its name, and delete an earlier ``final``.

    All files of the new directory are on the disk before it has its name. A crash at any point
    leaves a complete ``final``, or a complete ``old_name(final)`` for ``restore``.

    Raises:
        OSError: if the disk refuses; an earlier ``final`` then has its name again.
    """
    partial, old = partial_name(final), old_name(final)
    # A rename may reach the disk before the contents of the files that it makes visible.
    sync_directory(partial)
    if not (final.exists() and exchange_names(partial, final)):
        # A directory cannot be renamed onto another that is not empty.
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        try:
            partial.rename(final)
        except OSError:
            restore(final)
            raise
    sync_names(final.absolute().parent)
    # After an exchange, the earlier directory has the name of the partial one.
    for earlier in (old, partial):
        shutil.rmtree(earlier, ignore_errors=True)


def restore(final: Path) -> None:
    """Give an earlier directory its name back if a process ended while it replaced it."""
    old = old_name(final)
    if old.exists() and not final.exists():
        old.rename(final)


def partial_name(final: Path) -> Path:
    """Return the path at which ``final`` is written."""
    return final.with_name(final.name + PARTIAL)


def old_name(final: Path) -> Path:
    """Return the path of the earlier ``final`` while it is replaced by two renames."""
    return final.with_name(final.name + OLD)


def final_name(path: Path) -> Path:
    """Return the path of a complete directory from its partial or old one; others unchanged."""
    return path.with_name(path.name.removesuffix(PARTIAL).removesuffix(OLD))


def is_partial(path: Path) -> bool:
    """Return True if ``path`` has the name of a directory that is not complete."""
    return path.name.endswith(PARTIAL)


def _cannot_be_written(final: Path, error: OSError) -> DirectoryError:
    parent = next(path for path in final.absolute().parents if path.exists())
    free_mib = shutil.disk_usage(parent).free >> 20
    return DirectoryError(
        f"{error.filename or final}: cannot be written ({error.strerror or error}); {free_mib} MiB "
        f"are free in {parent}. {final} is as it was"
    )
