"""FlashAttention adapters: FlashAttention-3 without a patch, flash-attn-4 with its native learnable sink.

FlashAttention-3 knows no sink. Its stock forward is followed by one fused kernel that folds the sink in, and its stock
backward is called with the sink-aware O and LSE (see epilogue.py). The same core serves flash-attn-4 without its native
sink, which is how it is tested where FlashAttention-3 is not installed.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class PlainKernels:
    """Causal packed attention without a sink."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """(q, k, v, cu_seqlens, max_seqlen, window, scale) -> O, LSE [heads, tokens] fp32"""
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """(grad_o, q, k, v, o, lse, cu_seqlens, max_seqlen, window, scale) -> dQ, dK, dV"""


class FoldedSinkAttention(torch.autograd.Function):
    """O [tokens, heads, head_size] and LSE [tokens, heads] from kernels that know no sink."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor,
        kernels: PlainKernels,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from gptoss_kernels.sink_attention.epilogue import fold_sink

        o, lse = kernels.forward(q, k, v, cu_seqlens, max_seqlen, window, scale)
        fold_sink(o, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.arguments = kernels, cu_seqlens, max_seqlen, window, scale
        transposed = lse.t().contiguous()
        ctx.mark_non_differentiable(transposed)
        return o, transposed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: torch.Tensor, _grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from gptoss_kernels.sink_attention.epilogue import sink_gradient

        q, k, v, sinks, o, lse = ctx.saved_tensors
        kernels, *arguments = ctx.arguments
        grad_o = grad_o.contiguous()
        grad_sinks = sink_gradient(o, grad_o, lse, sinks)
        grads = kernels.backward(grad_o, q, k, v, o, lse, *arguments)
        return (*grads, grad_sinks, None, None, None, None, None)


def flash4_sink_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash-attn-4 with its native sink: O [tokens, heads, head_size], LSE [tokens, heads]."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    o, lse = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
        causal=window is None,
        window_size=(None, None) if window is None else (window - 1, 0),
        learnable_sink=sinks.float(),
        return_lse=True,
    )[:2]
    return o, lse.detach().t()


@functools.cache
def flash3_kernels() -> PlainKernels:
    """FlashAttention-3's stock kernels, from its flash_attn_interface module."""
    import flash_attn_interface as interface

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = interface._flash_attn_forward(
            q, k, v, softmax_scale=scale, causal=window is None, **_packing(cu_seqlens, max_seqlen, window, -1)
        )[:2]
        return o, lse

    def backward(
        grad_o: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        interface._flash_attn_backward(
            grad_o,
            q,
            k,
            v,
            o,
            lse,
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=scale,
            is_causal=window is None,
            **_packing(cu_seqlens, max_seqlen, window, -1),
        )
        return dq, dk, dv

    return PlainKernels(forward, backward)


@functools.cache
def flash4_kernels() -> PlainKernels:
    """flash-attn-4's kernels without their native sink."""
    import flash_attn.cute.interface as interface

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = interface._flash_attn_fwd(
            q,
            k,
            v,
            softmax_scale=scale,
            causal=window is None,
            return_lse=True,
            **_packing(cu_seqlens, max_seqlen, window, None),
        )[:2]
        return o, lse

    def backward(
        grad_o: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = interface._flash_attn_bwd(
            q,
            k,
            v,
            o,
            grad_o,
            lse,
            softmax_scale=scale,
            causal=window is None,
            **_packing(cu_seqlens, max_seqlen, window, None),
        )[:3]
        return dq, dk, dv

    return PlainKernels(forward, backward)


def _packing(cu_seqlens: torch.Tensor, max_seqlen: int, window: int | None, unlimited: int | None) -> dict[str, Any]:
    """The packing and window arguments that both packages take; ``unlimited`` is how each spells "no bound"."""
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "window_size_left": unlimited if window is None else window - 1,
        "window_size_right": unlimited if window is None else 0,
    }


@functools.cache
def installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
