"""Where the tokens of a row are that its ranks hold, as indices on the CPU."""

import torch
from torch import Tensor

from megatron_gptoss.context_parallel.layout import ContextLayout, Span


def token_order(layout: ContextLayout) -> Tensor:
    """Return where rank 0's tokens, then rank 1's and so on, are in the row: int64 [tokens]."""

    def make() -> Tensor:
        return torch.cat([row_indices(layout, span) for spans in layout.spans for span in spans])

    return layout.cached("token order", make)


def inverse_order(layout: ContextLayout) -> Tensor:
    """Return where each token of the row is in ``token_order``: int64 [tokens]."""

    def make() -> Tensor:
        order = token_order(layout)
        return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))

    return layout.cached("inverse order", make)


def row_indices(layout: ContextLayout, span: Span) -> Tensor:
    """Return where the span's tokens are in the row, int64."""
    return torch.arange(span.start, span.end) + layout.offsets[span.sequence]


def rank_tokens(layout: ContextLayout, rank: int) -> Tensor:
    """Return which tokens of the row a rank holds, int64 [tokens / size]."""
    first = rank * layout.tokens_per_rank
    return token_order(layout)[first : first + layout.tokens_per_rank]
