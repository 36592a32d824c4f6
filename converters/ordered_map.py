"""Parallel map over many tensors that yields the results in order."""

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Progress = Callable[[int, int], None]
"""Function of (bytes done, total bytes)."""


def ordered_map[Item, Result](
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    size: Callable[[Item], int],
    progress: Progress | None,
) -> Generator[Result, None, None]:
    """Yield ``function`` of every item in order, computed with one thread per core.

    Reading and converting overlap with the caller's work. The number of pending results is at most
    the number of threads plus 1, which limits memory. An error of a call is raised when its result
    is due.

    Args:
        function: called in a thread.
        items: arguments of the calls.
        size: size of an item in bytes, for ``progress``.
        progress: receives the bytes of the items whose results were used; None for no reports.
    """
    threads = os.cpu_count() or 1
    total_bytes = sum(size(item) for item in items)
    done_bytes = 0
    not_started = iter(items)
    pending: deque[Future[Result]] = deque()

    # torch's own threads would compete with the pool for the cores.
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def start_next() -> None:
            """Start the call for the next item, if there is one."""
            for item in not_started:
                pending.append(pool.submit(function, item))
                return

        try:
            # The loop below starts one more call, so that no thread is idle while the caller works.
            for _ in range(threads):
                start_next()
            for item in items:
                start_next()
                yield pending.popleft().result()

                # The caller has used the result, so progress includes the time of writing it.
                done_bytes += size(item)
                if progress is not None:
                    progress(done_bytes, total_bytes)
        finally:
            # Reached after an error or an early stop by the caller. Running calls finish.
            for future in pending:
                future.cancel()
