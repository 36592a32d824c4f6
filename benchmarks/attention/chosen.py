"""Which attention kernels Transformer Engine takes."""

import sys

MODULE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
"""Of Transformer Engine 2.20, where what was chosen last is a global variable."""


def chosen_attention() -> str | None:
    """Name the kernels of the last call of Transformer Engine's attention; None without one."""
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
