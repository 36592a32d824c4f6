"""The forward and the backward pass as plain functions, to communicate between and around them.

Queries may be the *last* tokens of longer key ranges: a context-parallel rank holds the queries of
some chunks and sees the keys of all tokens before them. The backward pass takes O and LSE as
arguments and so may cover only some of the keys: called with the O and LSE of *all* keys, its
gradients are the exact contributions of the keys it is given.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_kernels.sink_attention import flash
from gptoss_kernels.sink_attention.autograd import Gradients, SavedTensors
from gptoss_kernels.sink_attention.dispatch import ShapeClass, resolve_backend
from gptoss_kernels.sink_attention.layout import Segments, packed_layout
from gptoss_kernels.sink_attention.passes import bind_passes


@dataclass(frozen=True)
class AttentionSettings:
    """What an attention layer computes, apart from its tensors and their packing."""

    window: int | None
    """Keys that a query sees, itself included; None for all earlier ones."""
    scale: float
    """Factor of the scores."""
    backend: str = "auto"
    """One of ``sink_attention.BACKENDS``."""

    def backend_for(self, q: Tensor, k: Tensor) -> str:
        """Return the backend that computes attention of these tensors.

        Raises:
            ValueError: the backend that is set does not exist, or cannot take the tensors.
        """
        shape = ShapeClass(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], self.window)
        # Ranges of context-parallel ranks are long.
        return resolve_backend(self.backend, shape, short=False)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    segments: Segments,
    settings: AttentionSettings,
) -> tuple[Tensor, Tensor]:
    """Compute attention without autograd.

    Backends other than flash4 take unequal ranges by padding the queries to the keys' length.

    Args:
        q: [queries, heads, head_size]
        k, v: [keys, kv_heads, head_size]
        sinks: [heads]
        segments: which queries see which keys.
        settings: window, scale and backend.

    Returns:
        O like q, and LSE [queries, heads], natural logarithm with the sink in it, fp32 (fp64 for
        fp64 inputs).
    """
    window = settings.window
    scale = settings.scale
    backend = settings.backend_for(q, k)

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

    # The other kernels know one length per sequence: zero queries before the real ones fill up the
    # difference, at the price of attention that nobody reads.
    if not segments.square:
        rows, square = _square_segments(segments)
        o, lse = attention_forward(_pad_rows(q, rows, len(k)), k, v, sinks, square, settings)
        return o[rows], lse[rows]

    layout = packed_layout(segments.cu_seqlens_q)
    return bind_passes(backend, segments, layout, window, scale).forward(q, k, v, sinks)


def attention_backward(
    saved: SavedTensors, grad_o: Tensor, segments: Segments, settings: AttentionSettings
) -> Gradients:
    """Compute the gradients of q, k, v and the sinks.

    Args:
        saved: q, k, v, sinks, and O and LSE of the forward pass over all keys, which may be more
            than k and v are.
        grad_o: dO, like O.
        segments: which queries see which keys.
        settings: window, scale and backend.
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
            **flash.packing_options(segments, window),
        )
        return dq, dk, dv, dsinks.to(sinks.dtype)

    if not segments.square:
        rows, square = _square_segments(segments)
        padded_q = _pad_rows(q, rows, len(k))
        padded_o = _pad_rows(o, rows, len(k))
        padded_grad_o = _pad_rows(grad_o, rows, len(k))

        # An infinite LSE gives the rows that nobody asked for probabilities of exp(-inf) = 0.
        padded_lse = lse.new_full((len(k), lse.shape[1]), torch.inf)
        padded_lse.index_copy_(0, rows, lse)

        padded = (padded_q, k, v, sinks, padded_o, padded_lse)
        dq, dk, dv, dsinks = attention_backward(padded, padded_grad_o, square, settings)
        return dq[rows], dk, dv, dsinks

    layout = packed_layout(segments.cu_seqlens_q)
    return bind_passes(backend, segments, layout, window, scale).backward(saved, grad_o)


def _square_segments(segments: Segments) -> tuple[Tensor, Segments]:
    """Give every key a query.

    Returns where the real queries stand among the keys, int64 [queries], and the segments in which
    every key has its query.
    """
    key_ends = segments.cu_seqlens_k[1:].long()
    query_starts = segments.cu_seqlens_q[:-1]
    query_counts = segments.cu_seqlens_q.long().diff()

    # A segment's queries are its last keys: all of them move by the same distance.
    shifts = key_ends - query_counts - query_starts
    queries = torch.arange(int(segments.cu_seqlens_q[-1]), device=key_ends.device)
    rows = queries + torch.repeat_interleave(shifts, query_counts)

    square = Segments(
        cu_seqlens_q=segments.cu_seqlens_k,
        cu_seqlens_k=segments.cu_seqlens_k,
        max_seqlen_q=segments.max_seqlen_k,
        max_seqlen_k=segments.max_seqlen_k,
    )
    return rows, square


def _pad_rows(x: Tensor, rows: Tensor, length: int) -> Tensor:
    """Put x [n, ...] at ``rows`` of zeros [length, ...]."""
    return x.new_zeros(length, *x.shape[1:]).index_copy_(0, rows, x)
