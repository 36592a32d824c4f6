"""Counts what a Parquet file becomes: ``python -m rl_loop.data.parquet_size FILE LIMIT MEMORY``.

A process of its own with a limit on its memory: a value that is stored once may be meant a million
times, and nothing in the file says so before it is written out. Ends with status 0 if it is LIMIT
bytes at most. MEMORY: bytes of address space, of which libraries and threads take one GiB."""

import resource
import sys

BATCH_ROWS = 256
"""Rows that are decoded at a time."""
TOO_MUCH = 3
"""Exit status."""


def main() -> None:
    path, limit, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import pyarrow.parquet as parquet

    decoded = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
            decoded += batch.nbytes
            if decoded > limit:
                sys.exit(TOO_MUCH)


if __name__ == "__main__":
    main()
