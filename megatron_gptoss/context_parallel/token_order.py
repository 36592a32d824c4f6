"""Index tensors between the order of a row and the order of the ranks, on the CPU."""

import torch
from torch import Tensor

from megatron_gptoss.context_parallel.layout import ContextLayout, TokenSpan


def token_order(layout: ContextLayout) -> Tensor:
    """Return the row positions of rank 0's tokens, then of rank 1's, ..., [tokens] int64."""

    def make() -> Tensor:
        return torch.cat([row_indices(layout, span) for spans in layout.spans for span in spans])

    return layout.cached("token order", make)


def inverse_order(layout: ContextLayout) -> Tensor:
    """Return each row token's position in ``token_order``, [tokens] int64."""

    def make() -> Tensor:
        order = token_order(layout)
        return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))

    return layout.cached("inverse order", make)


def keeps_row_order(layout: ContextLayout) -> bool:
    """Return True if ``token_order`` is the order of the row."""
    return layout.cached("keeps order", lambda: bool((token_order(layout).diff() == 1).all()))


def row_indices(layout: ContextLayout, span: TokenSpan) -> Tensor:
    """Return the row position of each token in a span, [tokens of the span] int64.

    If sequences share prefixes, the span may begin in an ancestor of its segment.
    """
    ranges = layout.segments.row_ranges(*span)
    return torch.cat([torch.arange(start, end) for start, end in ranges])


def rank_tokens(layout: ContextLayout, rank: int) -> Tensor:
    """Return the row position of each token that a rank holds, [tokens / size] int64."""
    first = rank * layout.tokens_per_rank
    return token_order(layout)[first : first + layout.tokens_per_rank]
