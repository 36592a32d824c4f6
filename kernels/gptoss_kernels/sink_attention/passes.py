"""The forward and the backward pass as two plain functions, for callers that communicate between and around them.

Queries may be the *last* tokens of longer key ranges: a context-parallel rank holds the queries of some chunks and sees
the keys of all tokens before them. The backward pass takes O and LSE as arguments and so may cover only some of the
keys: called with the O and LSE of *all* keys, its gradients are the exact contributions of the keys it is given.
"""

from dataclasses import dataclass

import torch

from gptoss_kernels.sink_attention import flash
from gptoss_kernels.sink_attention.dispatch import choose
from gptoss_kernels.sink_attention.layout import packed_layout
from gptoss_kernels.sink_attention.reference import reference_backward, reference_forward
from gptoss_kernels.sink_attention.window import window_backward, window_forward


@dataclass(frozen=True)
class Segments:
    """Ranges of queries and the ranges of keys whose last tokens those queries are; keep one object per packing."""

    cu_seqlens_q: torch.Tensor
    """int32 [segments + 1]"""
    cu_seqlens_k: torch.Tensor
    """int32 [segments + 1]; the same object as ``cu_seqlens_q`` when the queries are all of the keys"""
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def square(self) -> bool:
        return self.cu_seqlens_k is self.cu_seqlens_q

    @classmethod
    def of(cls, query_lengths: list[int], key_lengths: list[int], device: torch.device) -> "Segments":
        def offsets(lengths: list[int]) -> torch.Tensor:
            return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

        cu_seqlens_q = offsets(query_lengths)
        cu_seqlens_k = cu_seqlens_q if key_lengths == query_lengths else offsets(key_lengths)
        return cls(cu_seqlens_q, cu_seqlens_k, max(query_lengths, default=0), max(key_lengths, default=0))


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    segments: Segments,
    window: int | None,
    scale: float,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [queries, heads, head_size], k, v: [keys, kv_heads, head_size] -> O like q and LSE [queries, heads], sink in.

    No autograd. Backends other than flash4 take unequal ranges by padding the queries to the length of the keys.
    """
    if backend == "auto":
        backend = choose(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], window)
    if backend == "flash4":
        from flash_attn.cute.interface import _flash_attn_fwd

        packing = _flash_packing(segments, window)
        o, lse = _flash_attn_fwd(
            q, k, v, softmax_scale=scale, learnable_sink=sinks.float(), return_lse=True, **packing
        )[:2]
        return o, lse.t()
    if not segments.square:
        rows, whole = _padding(segments)
        o, lse = attention_forward(_spread(q, rows, len(k)), k, v, sinks, whole, window, scale, backend)
        return o[rows], lse[rows]
    layout = packed_layout(segments.cu_seqlens_q)
    if backend == "window":
        return window_forward(q.contiguous(), k.contiguous(), v.contiguous(), sinks, layout, window, scale)
    if backend == "flash3":
        from gptoss_kernels.sink_attention.epilogue import fold_sink

        o, lse = flash.flash3_kernels().forward(q, k, v, segments.cu_seqlens_q, segments.max_seqlen_q, window, scale)
        fold_sink(o, lse, sinks)
        return o, lse.t()
    return reference_forward(q, k, v, sinks, layout, window, scale)


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    grad_o: torch.Tensor,
    segments: Segments,
    window: int | None,
    scale: float,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and the sinks, from the O and LSE of the forward pass over all keys."""
    if backend == "auto":
        backend = choose(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], window)
    if backend == "flash4":
        from flash_attn.cute.interface import _flash_attn_bwd

        packing = _flash_packing(segments, window)
        sink = sinks.float()
        dq, dk, dv, dsinks = _flash_attn_bwd(
            q, k, v, o, grad_o, lse.t(), softmax_scale=scale, learnable_sink=sink, **packing
        )
        return dq, dk, dv, dsinks.to(sinks.dtype)
    if not segments.square:
        rows, whole = _padding(segments)
        wide = [_spread(x, rows, len(k)) for x in (q, o, grad_o)]
        # a probability of exp(-inf) = 0 in the rows that nobody asked for
        wide_lse = lse.new_full((len(k), lse.shape[1]), torch.inf).index_copy_(0, rows, lse)
        dq, dk, dv, dsinks = attention_backward(
            wide[0], k, v, sinks, wide[1], wide_lse, wide[2], whole, window, scale, backend
        )
        return dq[rows], dk, dv, dsinks
    layout = packed_layout(segments.cu_seqlens_q)
    if backend == "window":
        q, k, v, o, lse, grad_o = (x.contiguous() for x in (q, k, v, o, lse, grad_o))
        return window_backward(q, k, v, sinks, o, lse, grad_o, layout, window, scale)
    if backend == "flash3":
        from gptoss_kernels.sink_attention.epilogue import sink_gradient

        by_head, grad_o = lse.t().contiguous(), grad_o.contiguous()
        arguments = segments.cu_seqlens_q, segments.max_seqlen_q, window, scale
        grads = flash.flash3_kernels().backward(grad_o, q, k, v, o, by_head, *arguments)
        return (*grads, sink_gradient(o, grad_o, by_head, sinks))
    return reference_backward(q, k, v, sinks, o, lse, grad_o, layout, window, scale)


def _flash_packing(segments: Segments, window: int | None) -> dict[str, object]:
    return {
        "causal": window is None,  # aligned to the last key where there are more keys than queries
        "window_size_left": None if window is None else window - 1,
        "window_size_right": None if window is None else 0,
        "cu_seqlens_q": segments.cu_seqlens_q,
        "cu_seqlens_k": segments.cu_seqlens_k,
        "max_seqlen_q": segments.max_seqlen_q,
        "max_seqlen_k": segments.max_seqlen_k,
    }


def _padding(segments: Segments) -> tuple[torch.Tensor, Segments]:
    """Where the queries stand among the keys, int64 [queries], and the segments with a query for every key."""
    ends, lengths = segments.cu_seqlens_k[1:].long(), segments.cu_seqlens_q.long().diff()
    first = ends - lengths - segments.cu_seqlens_q[:-1]
    queries = torch.arange(int(segments.cu_seqlens_q[-1]), device=ends.device)
    rows = queries + torch.repeat_interleave(first, lengths)
    whole = Segments(segments.cu_seqlens_k, segments.cu_seqlens_k, segments.max_seqlen_k, segments.max_seqlen_k)
    return rows, whole


def _spread(x: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
    return x.new_zeros(length, *x.shape[1:]).index_copy_(0, rows, x)
