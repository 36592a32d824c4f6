"""How many kv heads an all-gather takes at a time, which the cost model asks, too."""

GATHERED_BYTES = 34 << 20
"""Keys and values that a rank gathers at a time: one kv head of 131,072 tokens in bf16."""


def head_groups(tokens: int, kv_heads: int, bytes_per_token_and_head: int) -> list[slice]:
    """Choose which kv heads are gathered together.

    At least two groups where there are two kv heads, so that there is something to overlap with.

    Args:
        tokens: gathered from all ranks.
        kv_heads: of the layer.
        bytes_per_token_and_head: of a key and a value.
    """
    # The widest group that stays below GATHERED_BYTES, leaves two groups, and divides the heads:
    # groups of equal width share one size of buffer.
    most = max(1, GATHERED_BYTES // max(1, tokens * bytes_per_token_and_head))
    widest = min(most, kv_heads // 2)
    widths = [width for width in range(1, kv_heads + 1) if kv_heads % width == 0]
    width = max(width for width in widths if width == 1 or width <= widest)
    return [slice(first, first + width) for first in range(0, kv_heads, width)]
