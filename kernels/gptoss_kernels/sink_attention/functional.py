"""Forward and backward pass of attention as plain functions, for use by context parallelism.

Context parallelism communicates before, between and after the passes, so it calls them directly.

Queries may be the *last* tokens of a longer range of keys, because a context-parallel rank holds
the queries of some chunks and sees the keys of all earlier tokens. The backward pass takes O and LSE
as arguments, so its keys may be a part of all keys. With O and LSE of *all* keys, its gradients
are the exact contributions of the given keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_kernels.sink_attention import flash
from gptoss_kernels.sink_attention.autograd import Gradients, SavedTensors
from gptoss_kernels.sink_attention.dispatch import ShapeClass, resolve_backend
from gptoss_kernels.sink_attention.layout import AttentionSegments, packed_layout
from gptoss_kernels.sink_attention.passes import bind_passes


@dataclass(frozen=True)
class AttentionSettings:
    """Parameters of an attention layer that do not depend on the batch."""

    window: int | None
    """Number of keys that a query sees, including its own; None for all earlier keys."""
    scale: float
    """Factor of the scores."""
    backend: str = "auto"
    """One of ``sink_attention.BACKENDS``."""

    def backend_for(self, q: Tensor, k: Tensor) -> str:
        """Return the backend for these tensors.

        Args:
            q: [queries, heads, head_size], of any dtype.
            k: [keys, kv_heads, head_size].

        Raises:
            ValueError: the configured backend does not exist or does not support the tensors.
        """
        shape = ShapeClass(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], self.window)
        # Context parallelism is for long sequences, so never prefer the kernels for short ones.
        return resolve_backend(self.backend, shape, short=False)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    segments: AttentionSegments,
    settings: AttentionSettings,
) -> tuple[Tensor, Tensor]:
    """Compute attention without autograd.

    Backends other than flash4 pad the queries if there are fewer queries than keys.

    Args:
        q: [queries, heads, head_size].
        k: [keys, kv_heads, head_size].
        v: [keys, kv_heads, head_size].
        sinks: [heads] logits.
        segments: ranges of queries, and the range of keys that each of them sees.
        settings: window, scale and backend.

    Returns:
        O [queries, heads, head_size] with the dtype of q, and LSE [queries, heads]: the natural
        logarithm with the sink included, fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: the configured backend does not support the tensors.
    """
    window = settings.window
    scale = settings.scale
    backend = settings.backend_for(q, k)

    # Use private functions of flash-attn-4, because the public function wraps both in autograd.
    if backend == "flash4":
        from flash_attn.cute.interface import _flash_attn_fwd

        o, lse = _flash_attn_fwd(
            q,
            k,
            v,
            learnable_sink=sinks.float(),
            return_lse=True,
            softmax_scale=scale,
            causal=window is None,
            **flash.packing_options(segments, window),
        )[:2]
        return o, lse.t()

    # The other kernels have one length per sequence. Add zero queries before the real queries, and
    # discard their output.
    if not segments.square:
        rows, square = segments.padded
        o, lse = attention_forward(_pad_rows(q, rows, len(k)), k, v, sinks, square, settings)
        return o[rows], lse[rows]

    layout = packed_layout(segments.cu_seqlens_q)
    return bind_passes(backend, segments, layout, window, scale).forward(q, k, v, sinks)


def attention_backward(
    saved: SavedTensors, grad_o: Tensor, segments: AttentionSegments, settings: AttentionSettings
) -> Gradients:
    """Compute the gradients of q, k, v and the sinks.

    Args:
        saved: q [queries, heads, head_size], k and v [keys, kv_heads, head_size], sinks [heads],
            and O and LSE of the forward pass over all keys. k and v may be a part of all keys.
        grad_o: [queries, heads, head_size] gradient of O.
        segments: ranges of queries, and the range of keys that each of them sees.
        settings: window, scale and backend.

    Returns:
        Gradients with the shapes and dtypes of q, k, v and sinks.

    Raises:
        ValueError: the configured backend does not support the tensors.
    """
    q, k, v, sinks, o, lse = saved
    window = settings.window
    scale = settings.scale
    backend = settings.backend_for(q, k)

    if backend == "flash4":
        from flash_attn.cute.interface import _flash_attn_bwd

        dq, dk, dv, dsinks = _flash_attn_bwd(
            q,
            k,
            v,
            o,
            grad_o,
            lse.t(),
            learnable_sink=sinks.float(),
            softmax_scale=scale,
            causal=window is None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **flash.packing_options(segments, window),
        )
        return dq, dk, dv, dsinks.to(sinks.dtype)

    if not segments.square:
        rows, square = segments.padded
        padded_q = _pad_rows(q, rows, len(k))
        padded_o = _pad_rows(o, rows, len(k))
        padded_grad_o = _pad_rows(grad_o, rows, len(k))

        # An infinite LSE gives the added rows probabilities of exp(-inf) = 0, so they contribute
        # nothing to dK, dV and the gradient of the sinks.
        padded_lse = lse.new_full((len(k), lse.shape[1]), torch.inf)
        padded_lse.index_copy_(0, rows, lse)

        padded = (padded_q, k, v, sinks, padded_o, padded_lse)
        dq, dk, dv, dsinks = attention_backward(padded, padded_grad_o, square, settings)
        return dq[rows], dk, dv, dsinks

    layout = packed_layout(segments.cu_seqlens_q)
    return bind_passes(backend, segments, layout, window, scale).backward(saved, grad_o)


def _pad_rows(x: Tensor, rows: Tensor, length: int) -> Tensor:
    """Return zeros [length, ...] with x [n, ...] at ``rows`` [n]."""
    return x.new_zeros(length, *x.shape[1:]).index_copy_(0, rows, x)
