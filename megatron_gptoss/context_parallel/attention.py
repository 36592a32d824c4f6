"""Attention of a context-parallel rank, with the cheapest communication scheme for the layer."""

from collections.abc import Callable

from torch import Tensor
from torch.distributed import ProcessGroup

from gptoss_kernels.sink_attention.functional import AttentionSettings
from megatron_gptoss.context_parallel.all_gather import AllGatherAttention
from megatron_gptoss.context_parallel.all_to_all import all_to_all_attention
from megatron_gptoss.context_parallel.cost_model import (
    H200,
    AttentionShape,
    HardwareRates,
    choose_scheme,
)
from megatron_gptoss.context_parallel.halo import HaloAttention
from megatron_gptoss.context_parallel.layout import ContextLayout

SCHEMES: dict[str, Callable[..., Tensor]] = {
    "all_to_all": all_to_all_attention,
    "all_gather": AllGatherAttention.apply,
    "halo": HaloAttention.apply,
}
"""Function of each scheme: (q, k, v, sinks, layout, group, settings) -> O."""


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
    machine: HardwareRates = H200,
) -> Tensor:
    """Compute the attention of this rank's tokens over the tokens of all ranks. Collective.

    Every rank of the group must pass the same layout and settings.

    Args:
        q: [tokens / size, heads, head_size] in the order of ``rank_tokens(layout, rank)``.
        k: [tokens / size, kv_heads, head_size] in the same order.
        v: [tokens / size, kv_heads, head_size] in the same order.
        sinks: [heads], the same on every rank.
        layout: the rank of each token.
        group: context-parallel group.
        window: number of keys that a query sees, including its own; None for all earlier keys.
        scale: factor of the scores.
        backend: backend of ``sink_attention``.
        scheme: one of SCHEMES, or "auto" for the cheapest by ``cost_model``.
        machine: hardware for the cost model.

    Returns:
        O [tokens / size, heads, head_size] with the dtype of q, differentiable in q, k, v and
        sinks. The gradient of the sinks is a part; its sum over the group is the whole gradient.

    Raises:
        ValueError: ``scheme`` does not support the layer.
    """
    shape = AttentionShape(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_size=q.shape[2],
        bytes_per_element=q.element_size(),
    )
    # All ranks choose the same scheme, because layout and settings are the same. Otherwise their
    # collectives would not match.
    settings = AttentionSettings(window=window, scale=scale, backend=backend)
    chosen = choose_scheme(layout, shape, window, machine, scheme)
    return SCHEMES[chosen](q, k, v, sinks, layout, group, settings)
