"""FlashAttention adapters: FlashAttention-3 without a patch, flash-attn-4 with its native learnable sink.

FlashAttention-3 knows no sink: it is folded in (see epilogue.py). ``benchmarks/plain_flash4.py`` does the same with
flash-attn-4 without its native sink, which is how this is tested where FlashAttention-3 is not installed."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptoss_kernels.sink_attention.layout import Saved, Segments


@dataclass(frozen=True)
class Kernels:
    """Causal packed attention without a sink; ``options`` are the scale, the packing and the window."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    """(q, k, v, causal, **options) -> O, LSE [heads, tokens] fp32"""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(grad_o, (q, k, v, o, lse), causal, **options) -> dQ, dK, dV"""
    unlimited: int | None
    """How the package spells a window without a bound."""


def folded_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, plain: Kernels, segments: Segments, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """O [tokens, heads, head_size] and LSE [tokens, heads] from kernels that know no sink."""
    from gptoss_kernels.sink_attention.epilogue import fold_sink

    options = packing(segments, window, plain.unlimited)
    o, lse = plain.forward(q, k, v, window is None, softmax_scale=scale, **options)
    fold_sink(o, lse, sinks)
    return o, lse.t()


def folded_backward(
    saved: Saved, grad_o: Tensor, plain: Kernels, segments: Segments, window: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the sinks."""
    from gptoss_kernels.sink_attention.epilogue import sink_gradient

    q, k, v, sinks, o, lse = saved
    by_head, grad_o = lse.t().contiguous(), grad_o.contiguous()
    options = packing(segments, window, plain.unlimited)
    grads = plain.backward(grad_o, (q, k, v, o, by_head), window is None, softmax_scale=scale, **options)
    return (*grads, sink_gradient(o, grad_o, by_head, sinks))


FOLDED = folded_forward, folded_backward


def flash4_sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, segments: Segments, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """flash-attn-4 with its native sink: O [tokens, heads, head_size], LSE [tokens, heads]."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    options = packing(segments, window)
    window_size = options.pop("window_size_left"), options.pop("window_size_right")
    options |= {"softmax_scale": scale, "causal": window is None, "window_size": window_size}
    o, lse = flash_attn_varlen_func(q, k, v, learnable_sink=sinks.float(), return_lse=True, **options)[:2]
    return o, lse.detach().t()


@functools.cache
def flash3_kernels() -> Kernels:
    """FlashAttention-3's stock kernels, from its flash_attn_interface module."""
    import flash_attn_interface as interface

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, **options: Any) -> tuple[Tensor, Tensor]:
        o, lse = interface._flash_attn_forward(q, k, v, causal=causal, **options)[:2]
        return o, lse

    def backward(
        grad_o: Tensor, saved: tuple[Tensor, ...], causal: bool, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in saved[:3])
        interface._flash_attn_backward(grad_o, *saved, dq=dq, dk=dk, dv=dv, is_causal=causal, **options)
        return dq, dk, dv

    return Kernels(forward, backward, unlimited=-1)


def packing(segments: Segments, window: int | None, unlimited: int | None = None) -> dict[str, Any]:
    """The packing and window arguments that both packages take; ``unlimited`` is how each spells "no bound"."""
    return {
        "cu_seqlens_q": segments.cu_seqlens_q,
        "cu_seqlens_k": segments.cu_seqlens_k,
        "max_seqlen_q": segments.max_seqlen_q,
        "max_seqlen_k": segments.max_seqlen_k,
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
