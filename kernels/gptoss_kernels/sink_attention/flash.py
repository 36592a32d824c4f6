"""FlashAttention adapters: FlashAttention-3 without a patch, flash-attn-4 with its learnable sink.

FlashAttention-3 knows no sink: it is folded in (see epilogue.py). ``tests/support/kernels/plain_flash4.py``
does the same with flash-attn-4 without its native sink, which is how this is tested where
FlashAttention-3 is not installed.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptoss_kernels.sink_attention.autograd import AttentionPasses, Gradients, SavedTensors
from gptoss_kernels.sink_attention.layout import Segments


@dataclass(frozen=True)
class PlainKernels:
    """Causal packed attention without a sink; ``options``: scale, packing and window."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    """(q, k, v, causal, **options) -> O, LSE [heads, tokens] fp32"""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(grad_o, (q, k, v, o, lse), causal, **options) -> dQ, dK, dV"""
    unbounded: int | None
    """How the package spells a window without a bound."""


def folded_passes(
    kernels: PlainKernels, segments: Segments, window: int | None, scale: float
) -> AttentionPasses:
    """Bind ``folded_forward`` and ``folded_backward`` to one packing, window and scale."""
    bound: dict[str, Any] = {
        "kernels": kernels,
        "segments": segments,
        "window": window,
        "scale": scale,
    }
    return AttentionPasses(
        forward=functools.partial(folded_forward, **bound),
        backward=functools.partial(folded_backward, **bound),
    )


def folded_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    kernels: PlainKernels,
    segments: Segments,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute O [tokens, heads, head_size] and LSE [tokens, heads] with sink-free kernels."""
    from gptoss_kernels.sink_attention.epilogue import fold_sink

    options = packing_options(segments, window, kernels.unbounded)
    # Both packages keep LSE as [heads, tokens]; ours is [tokens, heads].
    o, lse = kernels.forward(q, k, v, window is None, softmax_scale=scale, **options)
    fold_sink(o, lse, sinks)
    return o, lse.t()


def folded_backward(
    saved: SavedTensors,
    grad_o: Tensor,
    kernels: PlainKernels,
    segments: Segments,
    window: int | None,
    scale: float,
) -> Gradients:
    """Compute the gradients of q, k, v and the sinks with kernels that know no sink.

    They are exact: the plain backward pass takes its probabilities from O and LSE, and these hold
    the sink.
    """
    from gptoss_kernels.sink_attention.epilogue import sink_gradient

    q, k, v, sinks, o, lse = saved
    lse_by_head = lse.t().contiguous()
    grad_o = grad_o.contiguous()
    options = packing_options(segments, window, kernels.unbounded)

    dq, dk, dv = kernels.backward(
        grad_o, (q, k, v, o, lse_by_head), window is None, softmax_scale=scale, **options
    )
    dsinks = sink_gradient(o, grad_o, lse_by_head, sinks)
    return dq, dk, dv, dsinks


def flash4_sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    segments: Segments,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run flash-attn-4 with its sink and autograd: O like q, LSE [tokens, heads]."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    options = packing_options(segments, window)
    window_size = (options.pop("window_size_left"), options.pop("window_size_right"))
    o, lse = flash_attn_varlen_func(
        q,
        k,
        v,
        learnable_sink=sinks.float(),
        return_lse=True,
        softmax_scale=scale,
        causal=window is None,
        window_size=window_size,
        **options,
    )[:2]
    return o, lse.detach().t()


@functools.cache
def flash3_kernels() -> PlainKernels:
    """Return FlashAttention-3's stock kernels, from its flash_attn_interface module."""
    import flash_attn_interface as interface

    def forward(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, **options: Any
    ) -> tuple[Tensor, Tensor]:
        o, lse = interface._flash_attn_forward(q, k, v, causal=causal, **options)[:2]
        return o, lse

    def backward(
        grad_o: Tensor, saved: tuple[Tensor, ...], causal: bool, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in saved[:3])
        interface._flash_attn_backward(
            grad_o, *saved, dq=dq, dk=dk, dv=dv, is_causal=causal, **options
        )
        return dq, dk, dv

    return PlainKernels(forward, backward, unbounded=-1)


def packing_options(
    segments: Segments, window: int | None, unbounded: int | None = None
) -> dict[str, Any]:
    """Spell packing and window as both packages take them.

    ``unbounded`` is how the package writes a window without a bound.
    """
    left = unbounded
    right = unbounded
    if window is not None:
        left = window - 1
        right = 0

    return {
        "cu_seqlens_q": segments.cu_seqlens_q,
        "cu_seqlens_k": segments.cu_seqlens_k,
        "max_seqlen_q": segments.max_seqlen_q,
        "max_seqlen_k": segments.max_seqlen_k,
        "window_size_left": left,
        "window_size_right": right,
    }


@functools.cache
def installed(module: str) -> bool:
    """Tell whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
