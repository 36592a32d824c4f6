"""Public function ``sink_attention``: checks its arguments, chooses a backend and runs it."""

import os

from torch import Tensor

from gptoss_kernels.sink_attention import flash
from gptoss_kernels.sink_attention.autograd import SinkAttentionFunction
from gptoss_kernels.sink_attention.dispatch import SHORT_MEAN, ShapeClass, resolve_backend
from gptoss_kernels.sink_attention.layout import AttentionSegments, PackedLayout
from gptoss_kernels.sink_attention.passes import bind_passes
from gptoss_kernels.sink_attention.validation import check_arguments, check_finite


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    window: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute causal attention over packed sequences with a learnable sink logit per query head.

    The sink is one more term of the softmax denominator: it takes probability and has no value.

    Args:
        q: [tokens, heads, head_size] queries, floating point.
        k: [tokens, kv_heads, head_size] keys with the dtype and device of q. heads is a multiple
            of kv_heads.
        v: [tokens, kv_heads, head_size] values, like k.
        sinks: [heads] logits, any floating dtype.
        cu_seqlens: [sequences + 1] int32 or int64 offsets of the packed sequences, from 0 to
            tokens. The first call with a tensor copies it to the host, so keep one tensor per
            packing and pass it to every layer.
        max_seqlen: length of the longest sequence in tokens, or an upper bound.
        window: number of keys that a query sees, including its own; None for all earlier keys.
        scale: factor of the scores; None for head_size ** -0.5.
        backend: one of BACKENDS. "auto" chooses by device, dtype, heads, head size, window and
            mean sequence length (dispatch.py).
        return_lse: whether to return the log-sum-exp, too.

    Returns:
        O [tokens, heads, head_size] with the dtype of q, differentiable in q, k, v and sinks. With
        return_lse a pair (O, LSE). LSE is [tokens, heads], the natural logarithm with the **sink
        included**, fp32 (fp64 for fp64 inputs), not differentiable.

    Raises:
        ValueError: an argument is wrong, or with GPTOSS_KERNELS_DEBUG=1 an input contains NaN or Inf.
            Raised before any launch. The message names the argument.

    Example:
        >>> import torch
        >>> # Two packed sequences of 5 and 3 tokens. 4 query heads share 2 kv heads.
        >>> q, k, v = torch.randn(8, 4, 16), torch.randn(8, 2, 16), torch.randn(8, 2, 16)
        >>> offsets = torch.tensor([0, 5, 8], dtype=torch.int32)
        >>> out = sink_attention(q, k, v, torch.zeros(4), cu_seqlens=offsets, max_seqlen=5)
        >>> out.shape
        torch.Size([8, 4, 16])
    """
    layout = check_arguments(q, k, v, sinks, cu_seqlens, max_seqlen, window, scale)
    shape = ShapeClass(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], window)
    backend = resolve_backend(backend, shape, short=layout.mean_length <= SHORT_MEAN)
    # Off by default, because the check waits for the stream.
    if os.environ.get("GPTOSS_KERNELS_DEBUG") == "1":
        check_finite(q=q, k=k, v=v, sinks=sinks)

    if scale is None:
        scale = q.shape[2] ** -0.5
    # The same tensor twice tells AttentionSegments that every key has a query.
    segments = AttentionSegments(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)

    o, lse = _run_backend(backend, q, k, v, sinks, layout, segments, window, scale)
    if return_lse:
        return o, lse
    return o


def _run_backend(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    layout: PackedLayout,
    segments: AttentionSegments,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return O [tokens, heads, head_size], differentiable, and LSE [tokens, heads] of a backend."""
    if backend == "flash4":
        # flash-attn-4 has its own autograd and supports sinks, so it needs no wrapper.
        return flash.flash4_sink_attention(q, k, v, sinks, segments, window, scale)

    passes = bind_passes(backend, segments, layout, window, scale)
    # FlashAttention takes strided views. The other backends need contiguous tensors.
    if backend == "flash3":
        return SinkAttentionFunction.apply(q, k, v, sinks, passes)
    return SinkAttentionFunction.apply(
        q.contiguous(), k.contiguous(), v.contiguous(), sinks, passes
    )
