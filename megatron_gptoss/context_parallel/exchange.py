"""Messages between context-parallel ranks. A group of one rank sends none."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Exchange:
    """Asynchronous collective. ``wait`` returns its result."""

    def __init__(self, result: Tensor, work: dist.Work | None) -> None:
        """Create an exchange in flight.

        Args:
            result: tensor that receives the result.
            work: communication that fills ``result``. None if the result is complete.
        """
        self._result = result
        self._work = work

    def wait(self) -> Tensor:
        """Return the result, which is complete for later operations on this stream."""
        if self._work is not None:
            self._work.wait()
        return self._result


def start_all_gather(local: Tensor, group: ProcessGroup) -> Exchange:
    """Gather ``local`` [n, ...] of all ranks as [ranks * n, ...]."""
    if group.size() == 1:
        return Exchange(local, None)
    gathered = local.new_empty(group.size() * len(local), *local.shape[1:])
    work = dist.all_gather_into_tensor(gathered, local, group=group, async_op=True)
    return Exchange(gathered, work)


def start_all_to_all(
    sent: Tensor, send_counts: list[int], receive_counts: list[int], group: ProcessGroup
) -> Exchange:
    """Send consecutive rows of a tensor to the ranks.

    Args:
        sent: [sum of ``send_counts``, ...] rows for rank 0, then for rank 1, ...
        send_counts: number of rows for each rank.
        receive_counts: number of rows from each rank.
        group: context-parallel group.

    Returns:
        Exchange of the received rows [sum of ``receive_counts``, ...] from rank 0, then from
        rank 1, ...
    """
    if group.size() == 1:
        return Exchange(sent, None)
    received = sent.new_empty(sum(receive_counts), *sent.shape[1:])
    work = dist.all_to_all_single(
        received, sent, receive_counts, send_counts, group=group, async_op=True
    )
    return Exchange(received, work)
