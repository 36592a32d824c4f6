"""The public function: check the arguments, choose a backend, run it."""

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptoss_kernels.sink_attention import flash
from gptoss_kernels.sink_attention.dispatch import BACKENDS, SHORT_MEAN, choose, why_not
from gptoss_kernels.sink_attention.layout import Segments
from gptoss_kernels.sink_attention.reference import reference_backward, reference_forward
from gptoss_kernels.sink_attention.validation import check_arguments, check_finite
from gptoss_kernels.sink_attention.window import window_backward, window_forward


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
    """Causal attention over packed sequences, with a learnable sink logit per query head in the softmax's denominator.

    Args:
        q: [tokens, heads, head_size]
        k, v: [tokens, kv_heads, head_size], same dtype and device as q; heads is a multiple of kv_heads.
        sinks: [heads], any floating dtype.
        cu_seqlens: [sequences + 1] int32 or int64 offsets of the packed sequences, from 0 to tokens. Read back to the
            host when first seen: keep one tensor per packing and pass it to every layer.
        max_seqlen: at least the longest sequence.
        window: keys a query sees, itself included; None for all earlier ones.
        scale: of the scores; head_size ** -0.5 when None.
        backend: one of BACKENDS; "auto" picks by device, dtype, heads, head size, window and mean sequence length
            (dispatch.py).
        return_lse: also return the log-sum-exp.

    Returns:
        O like q, differentiable in q, k, v and sinks. With return_lse also LSE [tokens, heads]: natural logarithm, the
        **sink included**, fp32 (fp64 for fp64 inputs), not differentiable.

    Raises:
        ValueError: naming the argument, before anything is launched. With GPTOSS_KERNELS_DEBUG=1 also when an input
            holds NaN or Inf."""
    layout = check_arguments(q, k, v, sinks, cu_seqlens, max_seqlen, window, scale)
    shape = q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], window
    if backend == "auto":
        backend = choose(*shape, layout.mean_length <= SHORT_MEAN)
    elif backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    elif (reason := why_not(backend, *shape)) is not None:
        raise ValueError(f"backend {backend!r} cannot take this: {reason}")
    if os.environ.get("GPTOSS_KERNELS_DEBUG") == "1":
        check_finite(q=q, k=k, v=v, sinks=sinks)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    segments = Segments(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    if backend == "flash4":
        o, lse = flash.flash4_sink_attention(q, k, v, sinks, segments, window, scale)
    elif backend == "flash3":
        o, lse = SinkAttention.apply(q, k, v, sinks, flash.FOLDED, flash.flash3_kernels(), segments, window, scale)
    else:
        own = backend in ("window", "short")
        passes = (window_forward, window_backward) if own else (reference_forward, reference_backward)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = SinkAttention.apply(q, k, v, sinks, passes, layout, window, scale)
    return (o, lse) if return_lse else o


class SinkAttention(torch.autograd.Function):
    """O [tokens, heads, head_size] and LSE [tokens, heads] by ``passes``, a backend's forward and backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, passes: tuple[Any, Any], *settings: Any
    ) -> tuple[Tensor, Tensor]:
        forward, ctx.backward_pass = passes
        ctx.settings = settings
        o, lse = forward(q, k, v, sinks, *settings)
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.backward_pass(ctx.saved_tensors, grad_o.contiguous(), *ctx.settings)
        return (*grads, None, *(None for _ in ctx.settings))
