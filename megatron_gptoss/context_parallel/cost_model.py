"""Cost model that chooses the communication scheme of a layer for a row."""

from dataclasses import dataclass
from math import gcd

from megatron_gptoss.context_parallel.head_groups import head_groups
from megatron_gptoss.context_parallel.layout import ContextLayout

COLLECTIVE_SECONDS = 3e-5
"""Minimum time of a collective."""

# The next constants are from docs/performance.md, context parallelism on H200.

BORDER_SECONDS = 8e-5
"""Time of a halo layer's small kernels, forward and backward."""
WINDOW_RATE = 0.44
"""Operations per second of window layers relative to full-attention layers."""
PREFIX_RATE = 0.89
"""Relative rate of full attention if the queries are the end of a longer key range."""
REORDERING_BANDWIDTH = 500e9
"""Bytes per second at which all-to-all reorders tokens and heads, before and after each message."""
# all_to_all holds queries, outputs and gradients in both orders. Its peak memory is 1.46x the data
# of a rank. The other schemes are between 0.9x and 1.1x.
ALL_TO_ALL_MIN_SPEEDUP = 1.15
"""Factor by which all_to_all must be faster to be chosen."""


@dataclass(frozen=True)
class AttentionShape:
    """Attention layer on one tensor-parallel rank."""

    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key and value heads."""
    head_size: int
    """Channels per head."""
    bytes_per_element: int = 2
    """Size of an element in bytes."""

    @property
    def head_bytes(self) -> int:
        """Bytes of one token in one head."""
        return self.head_size * self.bytes_per_element


@dataclass(frozen=True)
class HardwareRates:
    """Hardware parameters of the cost model."""

    bandwidth: float
    """Bytes per second that a rank sends to other ranks."""
    rate: float
    """Floating-point operations per second in full attention."""


H200 = HardwareRates(bandwidth=300e9, rate=525e12)
"""H200 GPUs on NVLink, with flash-attn-4.

For other hardware, choose schemes by ``parallel.context_scheme_full`` and
``parallel.context_scheme_window``.
"""


@dataclass(frozen=True)
class SchemeCost:
    """Cost of the forward and backward pass of one layer on the slowest rank."""

    scheme: str
    """Name of the scheme."""
    bytes_sent: float
    """Bytes that a rank sends to other ranks."""
    communication: float
    """Seconds of communication, including overlapped parts."""
    computation: float
    """Seconds of computation."""
    seconds: float
    """Total seconds after overlap."""


def candidates(
    layout: ContextLayout, shape: AttentionShape, window: int | None, machine: HardwareRates
) -> list[SchemeCost]:
    """Return the cost of each scheme that supports the layer, best first.

    Args:
        layout: the rank of each token.
        shape: the layer.
        window: number of keys that a query sees, including its own; None for all earlier keys.
        machine: hardware.
    """
    costs = []
    if shape.heads % layout.size == 0 and not layout.shares_prefixes:
        costs.append(_all_to_all_cost(layout, shape, window, machine))
    if window is None:
        costs.append(_all_gather_cost(layout, shape, machine))
    else:
        costs.append(_halo_cost(layout, shape, window, machine))

    def handicapped_seconds(cost: SchemeCost) -> float:
        if cost.scheme == "all_to_all":
            return cost.seconds * ALL_TO_ALL_MIN_SPEEDUP
        return cost.seconds

    return sorted(costs, key=handicapped_seconds)


def _all_to_all_cost(
    layout: ContextLayout, shape: AttentionShape, window: int | None, machine: HardwareRates
) -> SchemeCost:
    """Return the cost of exchanging tokens for heads: q, k, v and O, and their gradients."""
    size = layout.size
    pairs = sum(layout.pairs(rank, window) for rank in range(size)) / size

    # Every rank needs whole kv heads. If there are fewer heads than ranks, they are copied.
    kv_heads = shape.kv_heads * size // gcd(size, shape.kv_heads)
    # Heads in all messages: q and O have the query heads, k and v the kv heads. Each is sent once,
    # and its gradient once.
    head_tensors = 2 * (2 * shape.heads + 2 * kv_heads)
    sent = head_tensors * shape.head_bytes * layout.tokens_per_rank * (size - 1) / size
    # A rank also reorders the part of its data that it does not send.
    reordering = sent * size / (size - 1) / REORDERING_BANDWIDTH

    return _scheme_cost(
        "all_to_all",
        machine,
        bytes_sent=sent,
        # Four tensors forward, four gradients backward. The attention call needs all of them, so
        # none overlaps with it.
        collectives=8,
        computation=pairs * _seconds_per_pair(shape, window, machine) + reordering,
        exposed=1,
    )


def _all_gather_cost(
    layout: ContextLayout, shape: AttentionShape, machine: HardwareRates
) -> SchemeCost:
    """Return the cost of gathering keys and values of split sequences in groups of kv heads."""
    size = layout.size
    contributed = max(layout.shared)
    groups = 0
    if contributed:
        groups = len(head_groups(size * contributed, shape.kv_heads, 2 * shape.head_bytes))

    # Keys and values are sent twice, forward and backward. Their gradients are sent once, in fp32.
    keys_and_values = 2 * shape.kv_heads * shape.head_size * contributed * (size - 1)
    sent = keys_and_values * (2 * shape.bytes_per_element + 4)

    # Split sequences are slower: their queries are the end of a longer key range.
    rank_pairs = []
    for rank, spans in enumerate(layout.spans):
        shared_pairs = sum(span.pairs for span in spans if not layout.is_whole(span))
        rank_pairs.append(layout.pairs(rank) + (1 / PREFIX_RATE - 1) * shared_pairs)

    # The messages of all groups but the first overlap with the computation of another group.
    return _scheme_cost(
        "all_gather",
        machine,
        bytes_sent=sent,
        # Keys and values forward and backward, and their gradients.
        collectives=3 * groups,
        computation=max(rank_pairs) * _seconds_per_pair(shape, None, machine),
        exposed=1 / max(1, groups),
    )


def _halo_cost(
    layout: ContextLayout, shape: AttentionShape, window: int, machine: HardwareRates
) -> SchemeCost:
    """Return the cost of fetching the window - 1 tokens before each span, and their gradients."""
    border = max(sum(min(span.start, window - 1) for span in spans) for spans in layout.spans)
    # Keys and values, and the gradients of both.
    sent = 2 * 2 * shape.kv_heads * shape.head_bytes * border

    # The halo and the first rows of each span are computed a second time.
    pairs = max(layout.pairs(rank, window) for rank in range(layout.size)) + 2 * border * window
    return _scheme_cost(
        "halo",
        machine,
        bytes_sent=sent,
        collectives=2,
        computation=pairs * _seconds_per_pair(shape, window, machine) + BORDER_SECONDS,
        # The pass over all spans hides the messages: it does not need them, and takes longer.
        exposed=0,
    )


def _seconds_per_pair(shape: AttentionShape, window: int | None, machine: HardwareRates) -> float:
    """Return the seconds per (query, key) pair for all heads, forward and backward."""
    # 2 products forward and 5 backward, with 2 * head_size operations per pair each.
    relative_rate = 1 if window is None else WINDOW_RATE
    return 14 * shape.head_size * shape.heads / (machine.rate * relative_rate)


def _scheme_cost(
    scheme: str,
    machine: HardwareRates,
    bytes_sent: float,
    collectives: int,
    computation: float,
    exposed: float,
) -> SchemeCost:
    """Return the cost of a scheme.

    Args:
        scheme: name of the scheme.
        machine: hardware.
        bytes_sent: bytes that a rank sends.
        collectives: number of collective calls.
        computation: seconds of computation.
        exposed: fraction of the communication that does not overlap with computation.
    """
    communication = bytes_sent / machine.bandwidth + collectives * COLLECTIVE_SECONDS
    hidden = communication * (1 - exposed)
    return SchemeCost(
        scheme=scheme,
        bytes_sent=bytes_sent,
        communication=communication,
        computation=computation,
        seconds=communication - hidden + max(computation, hidden),
    )


def choose_scheme(
    layout: ContextLayout,
    shape: AttentionShape,
    window: int | None,
    machine: HardwareRates,
    requested: str = "auto",
) -> str:
    """Return the scheme for a layer.

    Args:
        layout: the rank of each token.
        shape: the layer.
        window: number of keys that a query sees, including its own; None for all earlier keys.
        machine: hardware.
        requested: name of a scheme, or "auto" for the cheapest.

    Raises:
        ValueError: the requested scheme does not support the layer.
    """
    key = ("schemes", shape, window, machine)
    possible = layout.cached(
        key, lambda: [cost.scheme for cost in candidates(layout, shape, window, machine)]
    )
    if requested == "auto":
        return possible[0]

    if requested == "all_to_all" and layout.shares_prefixes:
        raise ValueError(
            "all_to_all does not support sequences that share prefixes; "
            f"use {' or '.join(possible)}, or auto"
        )
    if requested not in possible:
        kind = "full layers" if window is None else f"layers with a window of {window}"
        raise ValueError(
            f"{requested} cannot split {kind} with {shape.heads} heads "
            f"over {layout.size} context-parallel ranks; use {' or '.join(possible)}, or auto"
        )
    return requested
