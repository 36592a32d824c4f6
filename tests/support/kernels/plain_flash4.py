"""flash-attn-4 without its native sink, for tests of the sink correction.

Tests and benchmarks use it instead of FlashAttention-3, which may not be installed.
"""

import functools
from typing import Any

from torch import Tensor

from gptoss_kernels.sink_attention.flash import PlainKernels


@functools.cache
def flash4_kernels() -> PlainKernels:
    """Return flash-attn-4's forward and backward kernels without their native sink."""
    import flash_attn.cute.interface as interface

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        o, lse = interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True, **options)[:2]
        return o, lse

    def backward(
        grad_o: Tensor, saved: tuple[Tensor, ...], causal: bool, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, o, lse = saved
        dq, dk, dv = interface._flash_attn_bwd(q, k, v, o, grad_o, lse, causal=causal, **options)[
            :3
        ]
        return dq, dk, dv

    return PlainKernels(forward, backward, unbounded=None)
