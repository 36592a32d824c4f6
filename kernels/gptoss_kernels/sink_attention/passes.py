"""The forward and the backward pass as two plain functions, for callers that communicate between and around them.

Queries may be the *last* tokens of longer key ranges: a context-parallel rank holds the queries of some chunks and sees
the keys of all tokens before them. The backward pass takes O and LSE as arguments and so may cover only some of the
keys: called with the O and LSE of *all* keys, its gradients are the exact contributions of the keys it is given."""

import torch
from torch import Tensor

from gptoss_kernels.sink_attention import flash
from gptoss_kernels.sink_attention.dispatch import choose
from gptoss_kernels.sink_attention.layout import Saved, Segments, packed_layout
from gptoss_kernels.sink_attention.reference import reference_backward, reference_forward
from gptoss_kernels.sink_attention.window import window_backward, window_forward


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, segments: Segments, window: int | None, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """q: [queries, heads, head_size], k, v: [keys, kv_heads, head_size] -> O like q and LSE [queries, heads], sink in.

    No autograd. Backends other than flash4 take unequal ranges by padding the queries to the length of the keys."""
    if backend == "auto":
        backend = choose(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], window, short=False)
    if backend == "flash4":
        from flash_attn.cute.interface import _flash_attn_fwd

        options = {"softmax_scale": scale, "causal": window is None, **flash.packing(segments, window)}
        o, lse = _flash_attn_fwd(q, k, v, learnable_sink=sinks.float(), return_lse=True, **options)[:2]
        return o, lse.t()
    if not segments.square:
        rows, whole = _padding(segments)
        o, lse = attention_forward(_spread(q, rows, len(k)), k, v, sinks, whole, window, scale, backend)
        return o[rows], lse[rows]
    layout = packed_layout(segments.cu_seqlens_q)
    if backend == "window":
        return window_forward(q, k, v, sinks, layout, window, scale)
    if backend == "flash3":
        return flash.folded_forward(q, k, v, sinks, flash.flash3_kernels(), segments, window, scale)
    return reference_forward(q, k, v, sinks, layout, window, scale)


def attention_backward(
    saved: Saved, grad_o: Tensor, segments: Segments, window: int | None, scale: float, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the sinks; ``saved``: q, k, v, sinks, and O and LSE of the forward over all keys."""
    q, k, v, sinks, o, lse = saved
    if backend == "auto":
        backend = choose(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], window, short=False)
    if backend == "flash4":
        from flash_attn.cute.interface import _flash_attn_bwd

        options = {"softmax_scale": scale, "causal": window is None, **flash.packing(segments, window)}
        dq, dk, dv, dsinks = _flash_attn_bwd(q, k, v, o, grad_o, lse.t(), learnable_sink=sinks.float(), **options)
        return dq, dk, dv, dsinks.to(sinks.dtype)
    if not segments.square:
        rows, whole = _padding(segments)
        wide_q, wide_o, wide_grad = (_spread(x, rows, len(k)) for x in (q, o, grad_o))
        # a probability of exp(-inf) = 0 in the rows that nobody asked for
        wide_lse = lse.new_full((len(k), lse.shape[1]), torch.inf).index_copy_(0, rows, lse)
        wide = wide_q, k, v, sinks, wide_o, wide_lse
        dq, dk, dv, dsinks = attention_backward(wide, wide_grad, whole, window, scale, backend)
        return dq[rows], dk, dv, dsinks
    layout = packed_layout(segments.cu_seqlens_q)
    if backend == "window":
        return window_backward(saved, grad_o, layout, window, scale)
    if backend == "flash3":
        return flash.folded_backward(saved, grad_o, flash.flash3_kernels(), segments, window, scale)
    return reference_backward(saved, grad_o, layout, window, scale)


def _padding(segments: Segments) -> tuple[Tensor, Segments]:
    """Where the queries stand among the keys, int64 [queries], and the segments with a query for every key."""
    ends, lengths = segments.cu_seqlens_k[1:].long(), segments.cu_seqlens_q.long().diff()
    first = ends - lengths - segments.cu_seqlens_q[:-1]
    queries = torch.arange(int(segments.cu_seqlens_q[-1]), device=ends.device)
    rows = queries + torch.repeat_interleave(first, lengths)
    whole = Segments(segments.cu_seqlens_k, segments.cu_seqlens_k, segments.max_seqlen_k, segments.max_seqlen_k)
    return rows, whole


def _spread(x: Tensor, rows: Tensor, length: int) -> Tensor:
    return x.new_zeros(length, *x.shape[1:]).index_copy_(0, rows, x)
