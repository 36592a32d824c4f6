"""Work on many tensors with all cores while their results are used in order."""

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch

from converters.names import ParameterMapping

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


def bf16_bytes(mapping: ParameterMapping) -> int:
    return 2 * math.prod(mapping.shape)


def in_order[Item, Result](
    function: Callable[[Item], Result], items: Sequence[Item], size: Callable[[Item], int], progress: Progress | None
) -> Generator[Result, None, None]:
    """``function`` of every item, in order, computed in as many threads as there are cores.

    At most one result more than there are threads waits to be taken: reading and converting overlap with what the
    caller does, and memory stays bounded however many items there are. Errors are raised where their result would come.
    ``progress`` counts the bytes of the items whose results were used."""
    threads, done, total = os.cpu_count() or 1, 0, sum(map(size, items))
    pending: deque[Future[Result]] = deque()
    # torch's own threads would fight with these
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            ahead = iter(items)
            for item in items:
                pending += [pool.submit(function, later) for later in islice(ahead, threads + 1 - len(pending))]
                yield pending.popleft().result()
                done += size(item)
                if progress is not None:
                    progress(done, total)
        finally:
            for future in pending:
                future.cancel()
