"""Work on many tensors with all cores while their results are used in order."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


def in_order[Item, Result](function: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    """``function`` of every item, in order, computed in as many threads as there are cores.

    At most one result more than there are threads waits to be taken: reading and converting overlap with what the
    caller does, and memory stays bounded however many items there are. Errors are raised where their result would come.
    """
    threads = os.cpu_count() or 1
    pending: deque[Future[Result]] = deque()
    # torch's own threads would fight with these
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
