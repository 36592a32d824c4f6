"""Sum of the gradients of keys that several spans see."""

from torch import Tensor


def add_in_order(total: Tensor, rows: Tensor, parts: Tensor) -> None:
    """Add rows to a tensor in place. The addends of a row are added in their order.

    A GPU adds the rows of one call of ``index_add_`` in any order. Three or more addends of a row
    would thus have other bits in every run.

    Args:
        total: [n, ...], of the dtype of the sum.
        rows: [k] int64 row of ``total`` for each part.
        parts: [k, ...] addends.
    """
    parts = parts.to(total.dtype)
    if total.is_cuda:
        # On GPUs index_put_ sorts the rows and adds equal rows one after another. On CPUs it is
        # index_add_ that adds them in order.
        total.index_put_((rows,), parts, accumulate=True)
    else:
        total.index_add_(0, rows, parts)
