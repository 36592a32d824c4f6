"""Attention over tokens that several ranks share: exact, sinks included.

What is imported here needs no torch, as a plan does without; ``attention`` and ``token_order`` do."""

from megatron_gptoss.context_parallel.cost_model import AttentionShape, Machine, candidates
from megatron_gptoss.context_parallel.layout import ContextLayout, balanced_layout

__all__ = [
    "AttentionShape",
    "ContextLayout",
    "Machine",
    "balanced_layout",
    "candidates",
]
