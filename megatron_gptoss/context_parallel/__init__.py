"""Attention over tokens that several ranks share: exact, sinks included."""

from megatron_gptoss.context_parallel.attention import context_parallel_attention
from megatron_gptoss.context_parallel.cost_model import AttentionShape, Machine, candidates
from megatron_gptoss.context_parallel.layout import ContextLayout, balanced_layout

__all__ = [
    "AttentionShape",
    "ContextLayout",
    "Machine",
    "balanced_layout",
    "candidates",
    "context_parallel_attention",
]
