"""Grouped matrix products of rows that are sorted by expert.

On a GPU in bf16, all experts are one call. Products with weights use Transformer Engine's grouped
product, like full training. Narrow products with adapter factors use torch's grouped product. On
other devices and dtypes there is one product per expert.
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
    """Compute x W^T + bias with the weight and bias of each row's expert.

    Args:
        x: [rows, in], contiguous, sorted by expert.
        weights: [experts, out, in], of the dtype of x.
        row_counts: rows per expert.
        biases: [experts, out]; None to add nothing.

    Returns:
        [rows, out], of the dtype of x.
    """
    if _is_grouped(x):
        return _transformer_engine(x, weights, row_counts, "TN", biases)

    out = x.new_empty(len(x), weights.shape[1])
    for expert, rows in enumerate(_spans(row_counts)):
        torch.matmul(x[rows], weights[expert].t(), out=out[rows])
        if biases is not None:
            out[rows] += biases[expert]
    return out


def multiply_by_transposed_weights(
    x: Tensor, weights: Tensor, row_counts: Sequence[int], sums: Tensor | None = None
) -> Tensor:
    """Compute x W with the weight of each row's expert.

    Args:
        x: [rows, out], contiguous, sorted by expert.
        weights: [experts, out, in], of the dtype of x.
        row_counts: rows per expert.
        sums: [rows, in] of the dtype of x, contiguous. Added before the result is rounded, and overwritten. None to
            add nothing.

    Returns:
        [rows, in], of the dtype of x.
    """
    if _is_grouped(x):
        return _transformer_engine(x, weights, row_counts, "NN", sums=sums)
    if sums is not None:
        return _add_products(x, weights, row_counts, sums)
    return project(x, weights, row_counts)


def project(x: Tensor, factors: Tensor, row_counts: Sequence[int]) -> Tensor:
    """Compute x F with the narrow factor F of each row's expert.

    Args:
        x: [rows, in], contiguous, sorted by expert.
        factors: [experts, in, out], of the dtype of x. On GPUs both sizes are multiples of 8.
        row_counts: rows per expert.

    Returns:
        [rows, out], of the dtype of x.
    """
    if _is_grouped(x):
        return torch.nn.functional.grouped_mm(x, factors, offs=_ends(row_counts, x.device))

    out = x.new_empty(len(x), factors.shape[2])
    for expert, rows in enumerate(_spans(row_counts)):
        torch.matmul(x[rows], factors[expert], out=out[rows])
    return out


def outer_products(left: Tensor, right: Tensor, row_counts: Sequence[int]) -> Tensor:
    """Compute left^T right over the rows of each expert.

    Args:
        left: [rows, m], contiguous, sorted by expert. On GPUs m is a multiple of 8.
        right: [rows, n], contiguous, sorted by expert. On GPUs n is a multiple of 8.
        row_counts: rows per expert.

    Returns:
        [experts, m, n], of the dtype of both; 0 for experts without rows.
    """
    # Here `offs` splits the dimension of the sum, which gives one [m, n] per expert.
    if _is_grouped(left):
        products = torch.nn.functional.grouped_mm(
            left.t(), right, offs=_ends(row_counts, left.device)
        )
    else:
        products = left.new_empty(len(row_counts), left.shape[1], right.shape[1])
        for expert, rows in enumerate(_spans(row_counts)):
            torch.matmul(left[rows].t(), right[rows], out=products[expert])

    # A kernel may leave memory uninitialized if an expert has no rows.
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
    """Add left^T right over the rows of each expert to separate tensors.

    Args:
        left: [rows, m], contiguous, sorted by expert.
        right: [rows, n], contiguous, sorted by expert.
        row_counts: rows per expert.
        sums: tensor [m, n] of each expert, at any address, of the dtype of ``left`` or a wider one.
    """
    # On GPUs the product accumulates itself, like the weight gradients of Transformer Engine.
    if _is_grouped(left):
        from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

        # In the column-major terms of cuBLAS, left^T right is "NT" of (right, left). ``accumulate``
        # adds to ``sums``. Transformer Engine's weight gradients set use_split_accumulator, which
        # affects only fp8.
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


def _add_products(x: Tensor, factors: Tensor, row_counts: Sequence[int], sums: Tensor) -> Tensor:
    """Add x F to ``sums`` in fp32 or wider, and round once. Return ``sums``.

    Args:
        x: [rows, in], sorted by expert.
        factors: [experts, in, out].
        row_counts: rows per expert.
        sums: [rows, out].
    """
    # Products of narrow dtypes on a CPU are rounded before a sum, so the operands are converted.
    wide = torch.promote_types(x.dtype, torch.float32)
    for expert, rows in enumerate(_spans(row_counts)):
        sums[rows] = torch.addmm(sums[rows].to(wide), x[rows].to(wide), factors[expert].to(wide))
    return sums


def _is_grouped(x: Tensor) -> bool:
    """Return True if all experts are one call."""
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0


def _transformer_engine(
    x: Tensor,
    weights: Tensor,
    row_counts: Sequence[int],
    layout: str,
    biases: Tensor | None = None,
    sums: Tensor | None = None,
) -> Tensor:
    """Return x W^T for layout "TN" or x W for "NN", like Transformer Engine's GroupedLinear.

    Args:
        x: [rows, in] or [rows, out], sorted by expert.
        weights: [experts, out, in].
        row_counts: rows per expert.
        layout: "TN" or "NN".
        biases: [experts, out]; None to add nothing.
        sums: [rows, out] or [rows, in]. Receives the result, which includes its values; None to allocate it. Not with
            ``biases``: cuBLAS does not say where it rounds if it adds both.
    """
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    assert biases is None or sums is None
    # The letters are those of cuBLAS: column-major, weight first.
    columns = weights.shape[1] if layout == "TN" else weights.shape[2]
    out = x.new_empty(len(x), columns) if sums is None else sums
    options: dict[str, Any] = {"accumulate": sums is not None}
    if biases is not None:
        options |= {"bias": list(biases.unbind()), "use_bias": True}
    general_grouped_gemm(
        list(weights.unbind()),
        list(x.split(list(row_counts))),
        [out],
        [None] * len(weights),
        x.dtype,
        layout=layout,
        m_splits=list(row_counts),
        # Transformer Engine computes gradients of inputs with this layout.
        grad=layout == "NN",
        single_output=True,
        **options,
    )
    return out


def _ends(row_counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the end of each expert's rows, [experts] int32."""
    # Pinned memory: a copy from pageable memory would wait for all queued work of the GPU.
    ends = torch.tensor(list(accumulate(row_counts)), dtype=torch.int32, pin_memory=True)
    return ends.to(device, non_blocking=True)


def _spans(row_counts: Sequence[int]) -> list[slice]:
    """Return the rows of each expert."""
    ends = list(accumulate(row_counts))
    return [slice(end - count, end) for end, count in zip(ends, row_counts, strict=True)]
