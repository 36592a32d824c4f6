"""Which scheme a layer takes: a model of what each would send and compute for the row at hand."""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_gptoss.context_parallel.all_gather import AllGatherAttention, head_groups
from megatron_gptoss.context_parallel.all_to_all import all_to_all_attention
from megatron_gptoss.context_parallel.halo import HaloAttention
from megatron_gptoss.context_parallel.layout import ContextLayout

SCHEMES: dict[str, Callable[..., Tensor]] = {
    "all_to_all": all_to_all_attention,
    "all_gather": AllGatherAttention.apply,
    "halo": HaloAttention.apply,
}
COLLECTIVE_SECONDS = 3e-5
"""What a collective costs however little it sends."""
# the following from docs/performance.md, context parallelism on H200s
BORDER_SECONDS = 8e-5
"""Small kernels of a halo layer, forward and backward."""
WINDOW_RATE = 0.44
"""Operations per second of window layers relative to full ones."""
PREFIX_RATE = 0.89
"""Of full attention whose queries are the end of a longer range of keys, relative to whole sequences."""
REORDERING = 500e9
"""Bytes per second at which all-to-all brings tokens and heads into order, on both sides of every message."""
ALL_TO_ALL_HANDICAP = 1.15
"""all_to_all must be this much faster to be taken: it holds queries, outputs and gradients in both orders (its peak is
1.46 times a rank's share where the others are at 0.9 to 1.1)."""


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer on one tensor-parallel rank."""

    heads: int
    kv_heads: int
    head_size: int
    bytes_per_element: int = 2


@dataclass(frozen=True)
class Machine:
    """What the cost model knows of the hardware: ``parallel.context_bandwidth`` and ``attention_tflops``, in units."""

    bandwidth: float
    """Bytes per second that a rank sends to the others."""
    rate: float
    """Floating-point operations per second in full attention."""


H200 = Machine(bandwidth=300e9, rate=525e12)


@dataclass(frozen=True)
class SchemeCost:
    """Forward and backward pass of one layer on the slowest rank."""

    scheme: str
    bytes_sent: float
    """To other ranks, per rank."""
    communication: float
    """Seconds of it, overlapped or not."""
    computation: float
    """Seconds."""
    seconds: float
    """Together, after overlap."""


def candidates(layout: ContextLayout, shape: AttentionShape, window: int | None, machine: Machine) -> list[SchemeCost]:
    """What each scheme that can serve such a layer would cost, the one to take first."""
    size = layout.size
    # two matrix products forward, five backward, each 2 x head_size operations per pair of a query and a key
    per_pair = 14 * shape.head_size * shape.heads / (machine.rate * (1 if window is None else WINDOW_RATE))
    pairs = [layout.pairs(rank, window) for rank in range(size)]
    token = shape.head_size * shape.bytes_per_element
    costs = []

    def add(scheme: str, bytes_sent: float, collectives: int, computation: float, exposed: float) -> None:
        communication = bytes_sent / machine.bandwidth + collectives * COLLECTIVE_SECONDS
        hidden = communication * (1 - exposed)
        seconds = communication - hidden + max(computation, hidden)
        costs.append(SchemeCost(scheme, bytes_sent, communication, computation, seconds))

    if shape.heads % size == 0:
        kv_heads = shape.kv_heads * size // gcd(size, shape.kv_heads)
        sent = 2 * (2 * shape.heads + 2 * kv_heads) * token * layout.tokens_per_rank * (size - 1) / size
        add("all_to_all", sent, 8, sum(pairs) / size * per_pair + sent * size / (size - 1) / REORDERING, exposed=1)
    if window is None:
        contributed = max(layout.shared)
        groups = len(head_groups(size * contributed, shape.kv_heads, 2 * token)) if contributed else 0
        keys_and_values = 2 * shape.kv_heads * shape.head_size * contributed * (size - 1)
        sent = keys_and_values * (2 * shape.bytes_per_element + 4)  # twice as they are, and their gradients in fp32
        shared = [sum(run.work for run in runs if not layout.is_whole(run)) for runs in layout.runs]
        slowest = max(work + (1 / PREFIX_RATE - 1) * part for work, part in zip(pairs, shared, strict=True))
        add("all_gather", sent, 3 * groups, slowest * per_pair, exposed=1 / max(1, groups))
    else:
        border = max(sum(min(run.start, window - 1) for run in runs) for runs in layout.runs)
        sent = 2 * 2 * shape.kv_heads * token * border
        # the border's halo and rows are computed a second time
        add("halo", sent, 2, (max(pairs) + 2 * border * window) * per_pair + BORDER_SECONDS, exposed=0)
    return sorted(costs, key=lambda cost: cost.seconds * (ALL_TO_ALL_HANDICAP if cost.scheme == "all_to_all" else 1))


def choose_scheme(
    layout: ContextLayout, shape: AttentionShape, window: int | None, machine: Machine, wanted: str = "auto"
) -> str:
    """The cheapest scheme, or ``wanted``. Raises ValueError where that cannot serve such a layer."""
    key = ("schemes", shape, window, machine)
    found = layout.cached(key, lambda: [cost.scheme for cost in candidates(layout, shape, window, machine)])
    if wanted == "auto":
        return found[0]
    if wanted not in found:
        kind = "full layers" if window is None else f"layers with a window of {window}"
        raise ValueError(
            f"{wanted} cannot split {kind} with {shape.heads} heads over {layout.size} context-parallel ranks; "
            f"use {' or '.join(found)}, or auto"
        )
    return wanted


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
    """Attention of this rank's tokens among those of all ranks: O like q, differentiable in q, k, v and sinks.

    q: [tokens / size, heads, head_size], k, v: [tokens / size, kv_heads, head_size] in the order of
    ``layout.part(rank)``; sinks: [heads], the same on every rank. The gradient of the sinks is this rank's share:
    adding it up over the group gives the whole, once."""
    shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2], q.element_size())
    run = SCHEMES[choose_scheme(layout, shape, window, machine, scheme)]
    return run(q, k, v, sinks, layout, group, window, scale, backend)
