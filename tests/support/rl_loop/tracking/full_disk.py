"""A limit on file sizes that acts like a full disk."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Let the operating system reject writes beyond ``size`` bytes of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
