"""Works on many tensors with all cores while their results are used in order."""

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


def ordered_map[Item, Result](
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    size: Callable[[Item], int],
    progress: Progress | None,
) -> Generator[Result, None, None]:
    """Yield ``function`` of every item, in order, computed in as many threads as there are cores.

    Reading and converting overlap with what the caller does. At most one result more than there
    are threads waits to be taken, so memory stays bounded however many items there are. An error
    is raised where its result would come.

    Args:
        function: called in a thread.
        items: its arguments.
        size: bytes of an item, for ``progress``.
        progress: told the bytes of the items whose results were used.
    """
    threads = os.cpu_count() or 1
    total_bytes = sum(size(item) for item in items)
    done_bytes = 0
    not_started = iter(items)
    pending: deque[Future[Result]] = deque()

    # torch's own threads would compete with these for the cores.
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def start_next() -> None:
            for item in not_started:
                pending.append(pool.submit(function, item))
                return

        try:
            # With the one that the loop starts, one more than there are threads: none of them
            # waits while the caller works.
            for _ in range(threads):
                start_next()
            for item in items:
                start_next()
                yield pending.popleft().result()

                done_bytes += size(item)
                if progress is not None:
                    progress(done_bytes, total_bytes)
        finally:
            # After an error, or when the caller stops early; those that run end by themselves.
            for future in pending:
                future.cancel()
