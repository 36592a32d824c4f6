"""Wrappers of FlashAttention-3 (unpatched) and flash-attn-4 (with its learnable sink).

FlashAttention-3 has no sink, so epilogue.py adds it afterwards. On machines without
FlashAttention-3, ``tests/support/kernels/plain_flash4.py`` tests this path with flash-attn-4 and
its native sink disabled.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptoss_kernels.sink_attention.autograd import AttentionPasses, Gradients, SavedTensors
from gptoss_kernels.sink_attention.layout import AttentionSegments


@dataclass(frozen=True)
class PlainKernels:
    """Kernels for causal packed attention without a sink.

    ``options`` are the scale and the result of ``packing_options``.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    """(q, k, v, causal, **options) -> O [tokens, heads, head_size], LSE [heads, tokens] fp32."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(grad_o, (q, k, v, o, lse), causal, **options) -> dQ, dK, dV."""
    unbounded: int | None
    """Value of the package for an unlimited window."""


def passes_with_added_sink(
    kernels: PlainKernels, segments: AttentionSegments, window: int | None, scale: float
) -> AttentionPasses:
    """Return the two passes with an added sink, bound to a packing, window and scale.

    Args:
        kernels: kernels of the package.
        segments: queries, and the keys that they see.
        window: number of keys that a query sees, including its own; None for all earlier keys.
        scale: factor of the scores.
    """
    bound: dict[str, Any] = {
        "kernels": kernels,
        "segments": segments,
        "window": window,
        "scale": scale,
    }
    return AttentionPasses(
        forward=functools.partial(forward_with_added_sink, **bound),
        backward=functools.partial(backward_with_added_sink, **bound),
    )


def forward_with_added_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    kernels: PlainKernels,
    segments: AttentionSegments,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute attention with sinks from kernels that have no sink.

    Args:
        q: [tokens, heads, head_size].
        k: [tokens, kv_heads, head_size].
        v: [tokens, kv_heads, head_size].
        sinks: [heads] logits.
        kernels: kernels of the package.
        segments: queries, and the keys that they see.
        window: number of keys that a query sees, including its own; None for all earlier keys.
        scale: factor of the scores.

    Returns:
        O [tokens, heads, head_size] and LSE [tokens, heads] fp32.
    """
    # Imported here, so that importing this module does not load Triton.
    from gptoss_kernels.sink_attention.epilogue import add_sink

    options = packing_options(segments, window, kernels.unbounded)
    # FlashAttention returns LSE as [heads, tokens]. This package uses [tokens, heads].
    o, lse = kernels.forward(q, k, v, window is None, softmax_scale=scale, **options)
    add_sink(o, lse, sinks)
    return o, lse.t()


def backward_with_added_sink(
    saved: SavedTensors,
    grad_o: Tensor,
    kernels: PlainKernels,
    segments: AttentionSegments,
    window: int | None,
    scale: float,
) -> Gradients:
    """Compute the gradients of q, k, v and the sinks with kernels that have no sink.

    The gradients are exact: the plain backward pass computes its probabilities from LSE, and LSE
    and O include the sink.

    Args:
        saved: q, k, v, sinks, O [tokens, heads, head_size] and LSE [tokens, heads].
        grad_o: [tokens, heads, head_size] gradient of O, of its dtype.
        kernels: kernels of the package.
        segments: queries, and the keys that they see.
        window: number of keys that a query sees, including its own; None for all earlier keys.
        scale: factor of the scores.
    """
    from gptoss_kernels.sink_attention.epilogue import sink_gradient

    q, k, v, sinks, o, lse = saved
    # The forward pass returned a transposed view of the package's tensor, so this is no copy.
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
    segments: AttentionSegments,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute attention with flash-attn-4, its native sink and its autograd.

    Blocks add their parts of dQ, dK and dV in any order, unless torch's deterministic algorithms are
    enabled.

    Args:
        q: [tokens, heads, head_size] bf16.
        k: [tokens, kv_heads, head_size] bf16.
        v: [tokens, kv_heads, head_size] bf16.
        sinks: [heads] logits.
        segments: queries, and the keys that they see.
        window: number of keys that a query sees, including its own; None for all earlier keys.
        scale: factor of the scores.

    Returns:
        O [tokens, heads, head_size], differentiable, and LSE [tokens, heads] fp32, detached.
    """
    from flash_attn.cute.interface import flash_attn_varlen_func

    options = packing_options(segments, window)
    # The public function takes both sides of the window as one tuple.
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
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **options,
    )[:2]
    return o, lse.detach().t()


@functools.cache
def flash3_kernels() -> PlainKernels:
    """Return the kernels of FlashAttention-3, from its module flash_attn_interface."""
    # The private functions: the public one hides the backward pass, which needs our O and LSE.
    import flash_attn_interface as interface

    def forward(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, **options: Any
    ) -> tuple[Tensor, Tensor]:
        o, lse = interface._flash_attn_forward(q, k, v, causal=causal, **options)[:2]
        return o, lse

    # FlashAttention-3 writes the gradients into tensors of the caller.
    def backward(
        grad_o: Tensor, saved: tuple[Tensor, ...], causal: bool, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in saved[:3])
        # ``saved`` is in the order of the arguments: q, k, v, O, LSE.
        interface._flash_attn_backward(
            grad_o, *saved, dq=dq, dk=dk, dv=dv, is_causal=causal, **options
        )
        return dq, dk, dv

    return PlainKernels(forward, backward, unbounded=-1)


def packing_options(
    segments: AttentionSegments, window: int | None, unbounded: int | None = None
) -> dict[str, Any]:
    """Return packing and window as keyword arguments of both FlashAttention packages.

    Args:
        segments: queries, and the keys that they see.
        window: number of keys that a query sees, including its own; None for all earlier keys.
        unbounded: value of the package for an unlimited window.
    """
    # FlashAttention counts the keys on each side of the query, without the query's own key.
    left = unbounded
    right = unbounded
    if window is not None:
        # A right side of 0 hides later keys, so a window is causal without the option. Callers set
        # `causal` for full attention only.
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
def is_installed(module: str) -> bool:
    """Return True if a module can be imported. The module itself is not imported."""
    try:
        # For a dotted name find_spec imports the parent package, which may be missing.
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
