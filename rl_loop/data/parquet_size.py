"""Measures the decoded size of a Parquet file.

Usage: ``python -m rl_loop.data.parquet_size FILE LIMIT MEMORY``

It runs as a separate process with a memory limit, because a value that is stored once may decode to
a million copies. The file does not show this before it is decoded. The exit status is 0 if the
decoded size is at most LIMIT bytes. MEMORY is the process's address space in bytes. Libraries and
threads take 1 GiB of it.
"""

import resource
import sys

BATCH_ROWS = 256
"""Number of rows that are decoded at a time."""
TOO_MUCH = 3
"""Exit status if the decoded size exceeds the limit."""


def main() -> None:
    path, limit, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # A process that fails at its memory limit must not write a core dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Imported after the limits are set, so that they hold for its memory, too.
    import pyarrow.parquet as parquet

    decoded = 0
    with parquet.ParquetFile(path) as file:
        # Stop at the limit, so that a huge file is not decoded to its end.
        for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
            decoded += batch.nbytes
            if decoded > limit:
                sys.exit(TOO_MUCH)


if __name__ == "__main__":
    main()
