"""The attention of a context-parallel rank: choose a scheme for the layer, run it."""

from collections.abc import Callable

from torch import Tensor
from torch.distributed import ProcessGroup

from gptoss_kernels.sink_attention.functional import AttentionSettings
from megatron_gptoss.context_parallel.all_gather import AllGatherAttention
from megatron_gptoss.context_parallel.all_to_all import all_to_all_attention
from megatron_gptoss.context_parallel.cost_model import (
    H200,
    AttentionShape,
    Machine,
    choose_scheme,
)
from megatron_gptoss.context_parallel.halo import HaloAttention
from megatron_gptoss.context_parallel.layout import ContextLayout

SCHEMES: dict[str, Callable[..., Tensor]] = {
    "all_to_all": all_to_all_attention,
    "all_gather": AllGatherAttention.apply,
    "halo": HaloAttention.apply,
}
"""(q, k, v, sinks, layout, group, settings) -> O"""


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    layout: ContextLayout,
    group: ProcessGroup,
    window: int | None,
    scale: float,
    backend: str = "auto",
    scheme: str = "auto",
    machine: Machine = H200,
) -> Tensor:
    """Compute the attention of this rank's tokens among those of all ranks.

    Every rank of the group calls it, with the same layout and settings.

    Args:
        q: [tokens / size, heads, head_size], in the order of ``rank_tokens(layout, rank)``.
        k, v: [tokens / size, kv_heads, head_size], in the same order.
        sinks: [heads], the same on every rank.
        layout: which rank holds which tokens.
        group: the context-parallel ranks.
        window: keys a query sees, itself included; None for all earlier ones.
        scale: of the scores.
        backend: of ``sink_attention``.
        scheme: one of SCHEMES, or "auto" for the one that ``cost_model`` finds the cheapest.
        machine: what the cost model knows of the hardware.

    Returns:
        O like q, differentiable in q, k, v and sinks. The gradient of the sinks is this rank's
        share: adding it up over the group gives the whole, once.

    Raises:
        ValueError: when ``scheme`` cannot serve such a layer.
    """
    shape = AttentionShape(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_size=q.shape[2],
        bytes_per_element=q.element_size(),
    )
    settings = AttentionSettings(window=window, scale=scale, backend=backend)
    chosen = choose_scheme(layout, shape, window, machine, scheme)
    return SCHEMES[chosen](q, k, v, sinks, layout, group, settings)
