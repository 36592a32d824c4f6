"""Argument checks of ``sink_attention``, all done before the first launch."""

import math

import torch
from torch import Tensor

from gptoss_kernels.sink_attention.layout import PackedLayout, packed_layout

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Supported data types."""


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    window: int | None,
    scale: float | None,
) -> PackedLayout:
    """Check the arguments of ``sink_attention``.

    Args:
        q: must be [tokens, heads, head_size], floating point.
        k: must be [tokens, kv_heads, head_size] with the dtype and device of q.
        v: must be like k.
        sinks: must be [heads], floating point, on the device of q.
        cu_seqlens: must be [sequences + 1] offsets that end at ``tokens``.
        max_seqlen: must be at least the length of the longest sequence.
        window: must be None or a positive int.
        scale: must be None or positive and finite.

    Returns:
        The layout of ``cu_seqlens``.

    Raises:
        ValueError: an argument is wrong. The message names it.
    """
    _check_queries_and_keys(q, k, v)
    _check_sinks(sinks, q)
    _check_window(window)
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be positive and finite, got {scale!r}")

    # Last, because reading cu_seqlens may wait for the stream.
    layout = packed_layout(cu_seqlens)
    tokens = q.shape[0]
    if layout.tokens != tokens:
        raise ValueError(f"cu_seqlens ends at {layout.tokens}, q has {tokens} tokens")
    if max_seqlen < layout.longest:
        raise ValueError(
            f"max_seqlen is {max_seqlen}, the longest sequence in cu_seqlens has "
            f"{layout.longest} tokens"
        )
    return layout


def _check_queries_and_keys(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError if shapes, dtypes or devices of q, k and v do not fit together."""
    if q.dim() != 3 or q.dtype not in FLOATING:
        raise ValueError(
            f"q must be a floating point [tokens, heads, head_size], got {q.dtype} {list(q.shape)}"
        )
    tokens, heads, head_size = q.shape

    for name, x in (("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[0] != tokens or x.shape[2] != head_size:
            raise ValueError(
                f"{name} must be [{tokens}, kv_heads, {head_size}] like q, got {list(x.shape)}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}")

    # Grouped-query attention: each kv head serves heads / kv_heads query heads.
    kv_heads = k.shape[1]
    if kv_heads != v.shape[1]:
        raise ValueError(f"v has {v.shape[1]} kv heads, k has {kv_heads}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"k has {kv_heads} kv heads, which does not divide the {heads} heads of q")


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raise ValueError if the sinks are not floating point [heads] on the device of q."""
    heads = q.shape[1]
    if sinks.dim() != 1 or sinks.shape[0] != heads or sinks.dtype not in FLOATING:
        raise ValueError(
            f"sinks must be a floating point [{heads}], got {sinks.dtype} {list(sinks.shape)}"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks are on {sinks.device}, q on {q.device}")


def _check_window(window: int | None) -> None:
    """Raise ValueError if the window is neither None nor a positive int."""
    if window is None:
        return

    # bool is a subclass of int, but a window of True is a mistake.
    is_int = isinstance(window, int) and not isinstance(window, bool)
    if not is_int or window < 1:
        raise ValueError(
            f"window must be None or a positive int (it counts the query itself), got {window!r}"
        )


def check_finite(**tensors: Tensor) -> None:
    """Check that all tensors are finite. Only for debugging, because it waits for the stream.

    Args:
        tensors: tensors of any shape [...] by their name in messages.

    Raises:
        ValueError: a tensor contains NaN or Inf. The message names the first such tensor.
    """
    # The first index helps to find the sequence or head that diverged.
    for name, x in tensors.items():
        bad = ~torch.isfinite(x)
        if bool(bad.any()):
            where = [int(i) for i in bad.nonzero()[0]]
            raise ValueError(
                f"{name} holds {int(bad.sum())} non-finite values, the first at index {where}"
            )
