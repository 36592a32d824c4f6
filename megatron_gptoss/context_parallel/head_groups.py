"""Groups of kv heads of an all-gather, used by the scheme and by the cost model."""

GATHERED_BYTES = 34 << 20
"""Bytes of keys and values per gather: one kv head of 131,072 tokens in bf16."""


def head_groups(tokens: int, kv_heads: int, bytes_per_token_and_head: int) -> list[slice]:
    """Return the groups of kv heads that are gathered together.

    There are at least two groups if there are at least two kv heads.

    Args:
        tokens: number of tokens gathered from all ranks.
        kv_heads: number of kv heads of the layer.
        bytes_per_token_and_head: size of a key and a value.
    """
    # Choose the widest group that stays below GATHERED_BYTES, leaves two groups (for overlap) and
    # divides the heads (groups of equal width reuse buffers).
    most = max(1, GATHERED_BYTES // max(1, tokens * bytes_per_token_and_head))
    widest = min(most, kv_heads // 2)
    widths = [width for width in range(1, kv_heads + 1) if kv_heads % width == 0]
    width = max(width for width in widths if width == 1 or width <= widest)
    return [slice(first, first + width) for first in range(0, kv_heads, width)]
