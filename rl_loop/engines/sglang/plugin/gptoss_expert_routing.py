"""Replacements of SGLang's and triton_kernels' functions for the routing of experts.

``gptoss_routing_kernels`` routes the few tokens of a decoding step and sums over their experts.
SGLang routes more tokens than a program can hold, as in a prefill. For these, this module keeps
triton_kernels from compiling two kernels again for most numbers of tokens (``with_common_strides``).
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
import triton
from gptoss_routing_kernels import ExpertAssignment, fits, route, sum_experts
from torch import Tensor

EXPERTS = "gptoss_experts"
"""Attribute of RoutingData with ``ExpertAssignment.experts``, for code that records the experts."""


def install() -> None:
    """Let SGLang's layers route and sum with these kernels."""
    from sglang.srt.layers.moe import topk

    # import_module returns the modules. The package also has functions of these names.
    matmul_ogs: Any = import_module("triton_kernels.matmul_ogs")
    choice: Any = import_module("triton_kernels.topk")

    topk.routing = fused_routing(topk)
    matmul_ogs.reduce = fused_reduce(matmul_ogs.reduce)
    choice.make_empty = with_common_strides(choice.make_empty)


def with_common_strides(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of ``make_empty``, which allocates the outputs of triton_kernels' top-k.

    It pads the bits of the chosen experts, uint32 [experts / 32, tokens], to a power of 2. Two
    kernels are compiled for the stride of these bits. Without the padding it is the number of
    tokens, rounded up to a multiple of 32, so a server would compile again for most of its first
    prefills without a CUDA graph. On an H200, such a prefill of 6,000 tokens took 0.9 s instead of
    0.2 s.
    """

    @wraps(original)
    def make_empty(
        offset: int, shape: tuple[int, ...], dtype: torch.dtype, device: Any, all_gather: bool
    ) -> Any:
        if dtype != torch.uint32 or all_gather:
            return original(offset, shape, dtype, device, all_gather=all_gather)
        words, tokens = shape
        padded = (words, triton.next_power_of_2(tokens))
        _, bits, offset = original(offset, padded, dtype, device, all_gather=False)
        bits = bits[:, :tokens]
        return (bits,), bits, offset

    return make_empty


def fused_routing(topk: Any) -> Callable[..., Any]:
    """Return a replacement of ``routing`` in SGLang's module ``topk``. It may call the original."""
    original = topk.routing

    @wraps(original)
    def routing(logits: Tensor, n_expts_act: int, **options: Any) -> Any:
        # The kernel has no softmax over all experts and cannot take given routes.
        is_plain = not options.get("sm_first") and options.keys() <= {"sm_first"}
        if not is_plain or not fits(logits):
            return original(logits, n_expts_act, **options)
        return as_routing_data(topk, route(logits, n_expts_act), n_expts_act)

    return routing


def as_routing_data(topk: Any, routes: ExpertAssignment, top_k: int) -> tuple[Any, Any, Any]:
    """Return routes as the arguments of triton_kernels' GEMMs: (routing data, gather, scatter)."""
    from triton_kernels.tensor import RaggedTensorMetadata

    metadata = RaggedTensorMetadata(
        routes.sizes, routes.starts, routes.block_starts, routes.schedule
    )
    data = topk.RoutingData(routes.gates, routes.sizes, len(routes.sizes), top_k, metadata)
    # RoutingData has no field for the experts of tokens.
    setattr(data, EXPERTS, routes.experts)
    gather = topk.GatherIndx(routes.by_expert, routes.places)
    scatter = topk.ScatterIndx(routes.places, routes.by_expert)
    return data, gather, scatter


def fused_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of triton_kernels' ``reduce``. It calls the original for other sums."""

    @wraps(original)
    def reduce(x: Tensor, dim: int, **options: Any) -> Any:
        sums: Any = options.get("y")
        is_plain = (
            x.ndim == 3
            and dim == 1
            and x.is_contiguous()
            and sums is not None
            and sums.is_contiguous()
            and x.dtype == sums.dtype == torch.bfloat16
            # bf16 outputs have no scales. The mask of ``reduce`` hides entries of missing tokens,
            # which do not occur in SGLang.
            and options.get("scale") is None
            and options.get("x_mxscale") is None
            and not options.get("y_has_mx")
        )
        if not is_plain:
            return original(x, dim, **options)
        sum_experts(x, sums)
        return sums, None

    return reduce
