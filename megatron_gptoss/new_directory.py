"""Atomic creation of directories: checkpoints, conversions and exports.

A directory is written as ``NAME.partial`` and renamed when it is complete. If NAME exists already,
the two names are exchanged atomically. File systems that cannot exchange names (NFS) need two
renames, between which the earlier directory has the name ``NAME.old``.
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
    """Directory that cannot be written. The message names it and the remedy."""


@contextmanager
def new_directory(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a directory to fill, and publish it as ``final`` afterwards. Delete it on an error.

    Args:
        final: path of the complete directory.
        overwrite: whether to replace an existing ``final``, which stays until the new directory is
            complete.

    Raises:
        DirectoryError: ``final`` exists and ``overwrite`` is False, or the block raises OSError. In
            the second case the message has the file and the free space.
    """
    if final.exists() and not overwrite:
        raise DirectoryError(f"{final}: exists already; delete it or choose another name")

    partial = partial_name(final)
    try:
        # An earlier process may have been killed between two renames.
        restore(final)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        publish(final)
    except OSError as error:
        raise _write_failure(final, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish(final: Path) -> None:
    """Rename the complete directory ``partial_name(final)`` to ``final``, replacing an earlier one.

    A crash at any point leaves a complete ``final``, or a complete ``old_name(final)`` for
    ``restore``.

    Raises:
        OSError: syncing or renaming fails. An earlier ``final`` then has its name again.
    """
    partial, old = partial_name(final), old_name(final)
    # Without this a power cut could leave the new name with empty files, because a rename may reach
    # the disk before the contents.
    sync_directory(partial)
    if not (final.exists() and exchange_names(partial, final)):
        # A directory cannot be renamed onto a directory that is not empty.
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        try:
            partial.rename(final)
        except OSError:
            restore(final)
            raise
    sync_names(final.absolute().parent)
    # After an exchange the earlier directory has the name of the partial directory.
    for earlier in (old, partial):
        shutil.rmtree(earlier, ignore_errors=True)


def restore(final: Path) -> None:
    """Rename an earlier directory back if a process ended while replacing it."""
    old = old_name(final)
    if old.exists() and not final.exists():
        old.rename(final)


def partial_name(final: Path) -> Path:
    """Return the path at which ``final`` is written."""
    return final.with_name(final.name + PARTIAL)


def old_name(final: Path) -> Path:
    """Return the path of the earlier directory between two renames."""
    return final.with_name(final.name + OLD)


def final_name(path: Path) -> Path:
    """Return ``path`` without the suffix of a partial or old directory."""
    return path.with_name(path.name.removesuffix(PARTIAL).removesuffix(OLD))


def is_partial(path: Path) -> bool:
    """Return True if ``path`` has the suffix of an incomplete directory."""
    return path.name.endswith(PARTIAL)


def _write_failure(final: Path, error: OSError) -> DirectoryError:
    """Return the error for a directory, with the free space of its file system."""
    parent = next(path for path in final.absolute().parents if path.exists())
    free_mib = shutil.disk_usage(parent).free >> 20
    return DirectoryError(
        f"{error.filename or final}: cannot be written ({error.strerror or error}). {free_mib} MiB are "
        f"free in {parent}. {final} is unchanged"
    )
