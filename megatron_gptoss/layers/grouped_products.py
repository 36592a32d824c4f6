"""Matrix products of rows that are sorted by expert: one matrix, or one result, for every expert.

On a GPU and in bf16 all experts are one call: Transformer Engine's grouped product, as in full
training, where the experts' weights take part, torch's where one side is only as wide as an
adapter's rank. Elsewhere one expert follows the other.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def multiply_by_weights(
    x: Tensor,
    weights: Tensor,
    row_counts: Sequence[int],
    biases: Tensor | None = None,
) -> Tensor:
    """Compute x W^T + bias with the weight and the bias of every row's expert.

    Args:
        x: [rows, in], contiguous, sorted by expert.
        weights: [experts, out, in].
        row_counts: rows of each expert.
        biases: [experts, out]; None for none.

    Returns:
        [rows, out].
    """
    if _is_grouped(x):
        return _transformer_engine(x, weights, row_counts, "TN", biases)

    out = x.new_empty(len(x), weights.shape[1])
    for expert, rows in enumerate(_spans(row_counts)):
        torch.matmul(x[rows], weights[expert].t(), out=out[rows])
        if biases is not None:
            out[rows] += biases[expert]
    return out


def multiply_by_transposed_weights(x: Tensor, weights: Tensor, row_counts: Sequence[int]) -> Tensor:
    """Compute x W with the weight of every row's expert.

    Args:
        x: [rows, out], contiguous, sorted by expert.
        weights: [experts, out, in].
        row_counts: rows of each expert.

    Returns:
        [rows, in].
    """
    if _is_grouped(x):
        return _transformer_engine(x, weights, row_counts, "NN")
    return project(x, weights, row_counts)


def project(x: Tensor, factors: Tensor, row_counts: Sequence[int]) -> Tensor:
    """Compute x F with the factor of every row's expert, of which one side is narrow.

    Args:
        x: [rows, in], contiguous, sorted by expert.
        factors: [experts, in, out]; on GPUs both sizes are multiples of 8.
        row_counts: rows of each expert.

    Returns:
        [rows, out].
    """
    if _is_grouped(x):
        return torch.nn.functional.grouped_mm(x, factors, offs=_ends(row_counts, x.device))

    out = x.new_empty(len(x), factors.shape[2])
    for expert, rows in enumerate(_spans(row_counts)):
        torch.matmul(x[rows], factors[expert], out=out[rows])
    return out


def outer_products(left: Tensor, right: Tensor, row_counts: Sequence[int]) -> Tensor:
    """Compute the sum over every expert's rows of left^T right; 0 for experts without rows.

    Args:
        left: [rows, m], contiguous, sorted by expert; on GPUs m is a multiple of 8.
        right: [rows, n], likewise.
        row_counts: rows of each expert.

    Returns:
        [experts, m, n].
    """
    # offs cuts the dimension that is summed over here: one product [m, n] for each expert's rows.
    if _is_grouped(left):
        products = torch.nn.functional.grouped_mm(
            left.t(), right, offs=_ends(row_counts, left.device)
        )
    else:
        products = left.new_empty(len(row_counts), left.shape[1], right.shape[1])
        for expert, rows in enumerate(_spans(row_counts)):
            torch.matmul(left[rows].t(), right[rows], out=products[expert])

    # A kernel that sums up nothing may leave what was there before.
    for expert, count in enumerate(row_counts):
        if count == 0:
            products[expert].zero_()
    return products


def add_outer_products(
    left: Tensor,
    right: Tensor,
    row_counts: Sequence[int],
    sums: Sequence[Any],
) -> None:
    """Add the products of ``outer_products`` to tensors that lie anywhere, of any wider dtype.

    On GPUs the product adds by itself, as the weight gradients of Transformer Engine do.

    Args:
        left: [rows, m], contiguous, sorted by expert.
        right: [rows, n], likewise.
        row_counts: rows of each expert.
        sums: a tensor [m, n] for each expert.
    """
    if _is_grouped(left):
        from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

        # In cuBLAS's column-major terms: "NT" of (right, left) is left^T right in ours. accumulate
        # adds to what is in ``sums``. The split accumulator is what Transformer Engine's own weight
        # gradients ask for; it concerns products of fp8 only.
        general_grouped_gemm(
            list(right.split(list(row_counts))),
            list(left.split(list(row_counts))),
            list(sums),
            [None] * len(sums),
            left.dtype,
            layout="NT",
            m_splits=list(row_counts),
            grad=True,
            accumulate=True,
            use_split_accumulator=True,
        )
        return

    for rows, total in zip(_spans(row_counts), sums, strict=True):
        total += left[rows].t() @ right[rows]


def _is_grouped(x: Tensor) -> bool:
    """Return whether all experts are one call."""
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0


def _transformer_engine(
    x: Tensor,
    weights: Tensor,
    row_counts: Sequence[int],
    layout: str,
    biases: Tensor | None = None,
) -> Tensor:
    """Multiply as Transformer Engine's GroupedLinear does: "TN" by W^T, "NN" by W."""
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    # The letters are cuBLAS's, column-major, weight first: "TN" is x W^T for rows x, "NN" is x W.
    columns = weights.shape[1] if layout == "TN" else weights.shape[2]
    out = x.new_empty(len(x), columns)
    options: dict[str, Any] = {}
    if biases is not None:
        options = {"bias": list(biases.unbind()), "use_bias": True}
    general_grouped_gemm(
        list(weights.unbind()),
        list(x.split(list(row_counts))),
        [out],
        [None] * len(weights),
        x.dtype,
        layout=layout,
        m_splits=list(row_counts),
        grad=layout == "NN",
        single_output=True,
        **options,
    )
    return out


def _ends(row_counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the row behind each expert's last one, int32 [experts]."""
    # From pinned memory: a copy from elsewhere would wait until the GPU has done what is queued.
    ends = torch.tensor(list(accumulate(row_counts)), dtype=torch.int32, pin_memory=True)
    return ends.to(device, non_blocking=True)


def _spans(row_counts: Sequence[int]) -> list[slice]:
    """Return the rows of each expert."""
    ends = list(accumulate(row_counts))
    return [slice(end - count, end) for end, count in zip(ends, row_counts, strict=True)]
