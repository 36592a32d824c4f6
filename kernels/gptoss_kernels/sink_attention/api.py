"""The public function: check the arguments, choose a backend, run it."""

import os

from torch import Tensor

from gptoss_kernels.sink_attention import flash
from gptoss_kernels.sink_attention.autograd import SinkAttention
from gptoss_kernels.sink_attention.dispatch import SHORT_MEAN, ShapeClass, resolve_backend
from gptoss_kernels.sink_attention.layout import PackedLayout, Segments
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

    The sink is one more term of the softmax's denominator: it takes probability and has no value.

    Args:
        q: [tokens, heads, head_size]
        k, v: [tokens, kv_heads, head_size], same dtype and device as q; heads is a multiple of
            kv_heads.
        sinks: [heads], any floating dtype.
        cu_seqlens: [sequences + 1] int32 or int64 offsets of the packed sequences, from 0 to
            tokens. Read back to the host when first seen: keep one tensor per packing and pass it
            to every layer.
        max_seqlen: at least the longest sequence.
        window: keys a query sees, itself included; None for all earlier ones.
        scale: of the scores; head_size ** -0.5 when None.
        backend: one of BACKENDS; "auto" picks by device, dtype, heads, head size, window and mean
            sequence length (dispatch.py).
        return_lse: also return the log-sum-exp.

    Returns:
        O like q, differentiable in q, k, v and sinks. With return_lse also LSE [tokens, heads]:
        natural logarithm, the **sink included**, fp32 (fp64 for fp64 inputs), not differentiable.

    Raises:
        ValueError: naming the argument, before anything is launched. With GPTOSS_KERNELS_DEBUG=1
            also when an input holds NaN or Inf.
    """
    layout = check_arguments(q, k, v, sinks, cu_seqlens, max_seqlen, window, scale)
    shape = ShapeClass(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], window)
    backend = resolve_backend(backend, shape, short=layout.mean_length <= SHORT_MEAN)
    if os.environ.get("GPTOSS_KERNELS_DEBUG") == "1":
        check_finite(q=q, k=k, v=v, sinks=sinks)

    if scale is None:
        scale = q.shape[2] ** -0.5
    segments = Segments(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)

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
    segments: Segments,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return O and LSE as one backend computes them, O differentiable."""
    if backend == "flash4":
        # It is differentiable by itself and knows sinks.
        return flash.flash4_sink_attention(q, k, v, sinks, segments, window, scale)

    passes = bind_passes(backend, segments, layout, window, scale)
    if backend == "flash3":
        return SinkAttention.apply(q, k, v, sinks, passes)
    return SinkAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), sinks, passes)
