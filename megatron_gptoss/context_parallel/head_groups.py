"""Groups of kv heads whose keys are gathered together, used by the scheme and by the cost model."""

GATHERED_BYTES = 34 << 20
"""Bytes of keys and values per message: one kv head of 131,072 tokens in bf16."""
COPIED_BYTES = 512 << 20
"""Bytes of copied keys and values per attention call of one rank."""
BACKWARD_COPIES = 5
"""Memory of the backward pass relative to these bytes. Gradients are in bf16, stacked, and in
fp32."""


def head_groups(tokens: int, kv_heads: int, bytes_per_token_and_head: int) -> list[slice]:
    """Return the groups of kv heads that are gathered from other ranks together.

    There are at least two groups if there are at least two kv heads.

    Args:
        tokens: number of tokens gathered from all ranks.
        kv_heads: number of kv heads of the layer.
        bytes_per_token_and_head: size of a key and a value.
    """
    # With two groups, the messages of one overlap with the computation of the other.
    return _groups(GATHERED_BYTES, kv_heads // 2, tokens, kv_heads, bytes_per_token_and_head)


def copied_head_groups(keys: int, kv_heads: int, bytes_per_token_and_head: int) -> list[slice]:
    """Return the groups of kv heads of a rank without messages. The arguments are as above."""
    return _groups(COPIED_BYTES, kv_heads, keys, kv_heads, bytes_per_token_and_head)


def _groups(
    limit: int, widest: int, tokens: int, kv_heads: int, bytes_per_token_and_head: int
) -> list[slice]:
    """Return the widest groups below a limit of bytes that divide the heads."""
    widest = min(widest, limit // max(1, tokens * bytes_per_token_and_head))
    # Groups of equal width reuse buffers.
    widths = [width for width in range(1, kv_heads + 1) if kv_heads % width == 0]
    width = max(width for width in widths if width == 1 or width <= widest)
    return [slice(first, first + width) for first in range(0, kv_heads, width)]
