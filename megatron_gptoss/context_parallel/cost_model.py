"""Which scheme a layer takes: a model of what each would send and compute for the row at hand."""

from dataclasses import dataclass
from math import gcd

from megatron_gptoss.context_parallel.head_groups import head_groups
from megatron_gptoss.context_parallel.layout import ContextLayout

COLLECTIVE_SECONDS = 3e-5
"""What a collective costs however little it sends."""

# The following are from docs/performance.md, context parallelism on H200s.

BORDER_SECONDS = 8e-5
"""Small kernels of a halo layer, forward and backward."""
WINDOW_RATE = 0.44
"""Operations per second of window layers relative to full ones."""
PREFIX_RATE = 0.89
"""The same of full attention whose queries are the end of a longer range of keys."""
REORDERING = 500e9
"""Bytes per second at which all-to-all brings tokens and heads into order, on both sides of every
message."""
ALL_TO_ALL_HANDICAP = 1.15
"""all_to_all must be this much faster to be taken: it holds queries, outputs and gradients in both
orders (its peak is 1.46 times a rank's share where the others are at 0.9 to 1.1)."""


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer on one tensor-parallel rank."""

    heads: int
    kv_heads: int
    head_size: int
    bytes_per_element: int = 2

    @property
    def head_bytes(self) -> int:
        """Bytes of one token of one head."""
        return self.head_size * self.bytes_per_element


@dataclass(frozen=True)
class Machine:
    """Hardware of the cost model."""

    bandwidth: float
    """Bytes per second that a rank sends to the others."""
    rate: float
    """Floating-point operations per second in full attention."""


H200 = Machine(bandwidth=300e9, rate=525e12)
"""NVLink between H200s, and flash-attn-4 on one of them. Where another network or GPU makes another
scheme the cheapest, ``parallel.context_scheme_full`` and ``context_scheme_window`` choose it."""


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


def candidates(
    layout: ContextLayout, shape: AttentionShape, window: int | None, machine: Machine
) -> list[SchemeCost]:
    """Estimate what each scheme that can serve such a layer would cost; the best comes first."""
    costs = []
    if shape.heads % layout.size == 0:
        costs.append(_all_to_all_cost(layout, shape, window, machine))
    if window is None:
        costs.append(_all_gather_cost(layout, shape, machine))
    else:
        costs.append(_halo_cost(layout, shape, window, machine))

    def handicapped_seconds(cost: SchemeCost) -> float:
        if cost.scheme == "all_to_all":
            return cost.seconds * ALL_TO_ALL_HANDICAP
        return cost.seconds

    return sorted(costs, key=handicapped_seconds)


def _all_to_all_cost(
    layout: ContextLayout, shape: AttentionShape, window: int | None, machine: Machine
) -> SchemeCost:
    """Ranks trade tokens for heads: q, O, k and v forward, their gradients backward."""
    size = layout.size
    pairs = sum(layout.pairs(rank, window) for rank in range(size)) / size

    # Every rank needs whole kv heads: they are copied when there are fewer than ranks.
    kv_heads = shape.kv_heads * size // gcd(size, shape.kv_heads)
    head_tensors = 2 * (2 * shape.heads + 2 * kv_heads)
    sent = head_tensors * shape.head_bytes * layout.tokens_per_rank * (size - 1) / size
    reordering = sent * size / (size - 1) / REORDERING

    return _scheme_cost(
        "all_to_all",
        machine,
        bytes_sent=sent,
        collectives=8,
        computation=pairs * _seconds_per_pair(shape, window, machine) + reordering,
        exposed=1,
    )


def _all_gather_cost(layout: ContextLayout, shape: AttentionShape, machine: Machine) -> SchemeCost:
    """Every rank gets the keys and values of shared sequences, a group of kv heads at a time."""
    size = layout.size
    contributed = max(layout.shared)
    groups = 0
    if contributed:
        groups = len(head_groups(size * contributed, shape.kv_heads, 2 * shape.head_bytes))

    # Keys and values are sent twice as they are, and their gradients once in fp32.
    keys_and_values = 2 * shape.kv_heads * shape.head_size * contributed * (size - 1)
    sent = keys_and_values * (2 * shape.bytes_per_element + 4)

    # Shared sequences are slower: their queries are the end of a longer range of keys.
    rank_pairs = []
    for rank, spans in enumerate(layout.spans):
        shared_pairs = sum(span.pairs for span in spans if not layout.is_whole(span))
        rank_pairs.append(layout.pairs(rank) + (1 / PREFIX_RATE - 1) * shared_pairs)

    # Of a group's messages only the first group's are not hidden behind another's computation.
    return _scheme_cost(
        "all_gather",
        machine,
        bytes_sent=sent,
        collectives=3 * groups,
        computation=max(rank_pairs) * _seconds_per_pair(shape, None, machine),
        exposed=1 / max(1, groups),
    )


def _halo_cost(
    layout: ContextLayout, shape: AttentionShape, window: int, machine: Machine
) -> SchemeCost:
    """Every rank gets the window - 1 tokens before each of its spans, and sends gradients back."""
    border = max(sum(min(span.start, window - 1) for span in spans) for spans in layout.spans)
    sent = 2 * 2 * shape.kv_heads * shape.head_bytes * border

    # The border's halo and rows are computed a second time.
    pairs = max(layout.pairs(rank, window) for rank in range(layout.size)) + 2 * border * window
    return _scheme_cost(
        "halo",
        machine,
        bytes_sent=sent,
        collectives=2,
        computation=pairs * _seconds_per_pair(shape, window, machine) + BORDER_SECONDS,
        exposed=0,
    )


def _seconds_per_pair(shape: AttentionShape, window: int | None, machine: Machine) -> float:
    """Estimate the seconds per pair of a query and a key, all heads, forward and backward.

    Two matrix products forward and five backward, each 2 * head_size operations per pair.
    """
    relative_rate = 1 if window is None else WINDOW_RATE
    return 14 * shape.head_size * shape.heads / (machine.rate * relative_rate)


def _scheme_cost(
    scheme: str,
    machine: Machine,
    bytes_sent: float,
    collectives: int,
    computation: float,
    exposed: float,
) -> SchemeCost:
    """Add up a scheme's cost; of its communication the share ``exposed`` overlaps with nothing."""
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
    machine: Machine,
    requested: str = "auto",
) -> str:
    """Choose the cheapest scheme, or check ``requested``.

    Raises:
        ValueError: when the requested scheme cannot serve such a layer.
    """
    key = ("schemes", shape, window, machine)
    possible = layout.cached(
        key, lambda: [cost.scheme for cost in candidates(layout, shape, window, machine)]
    )
    if requested == "auto":
        return possible[0]

    if requested not in possible:
        kind = "full layers" if window is None else f"layers with a window of {window}"
        raise ValueError(
            f"{requested} cannot split {kind} with {shape.heads} heads "
            f"over {layout.size} context-parallel ranks; use {' or '.join(possible)}, or auto"
        )
    return requested
