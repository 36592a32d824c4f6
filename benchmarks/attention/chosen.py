"""Attention kernels that Transformer Engine chose."""

import sys

MODULE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
"""Module of Transformer Engine 2.20 whose global variable holds the last choice."""


def chosen_attention() -> str | None:
    """Return the kernels of Transformer Engine's last attention call; None if there is none."""
    module = sys.modules.get(MODULE)
    if module is None:
        return None

    chosen = module._attention_backends
    if chosen["use_flash_attention"]:
        return f"flash-attn {chosen['flash_attention_backend']}"
    if chosen["use_fused_attention"]:
        return f"cuDNN ({chosen['fused_attention_backend']})"
    if chosen["use_unfused_attention"]:
        return "unfused"
    return None
