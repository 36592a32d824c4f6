"""Attention over tokens that several ranks share, built around ``sink_attention`` and exact with sinks."""

from megatron_gptoss.context_parallel.choose import AttentionShape, Machine, candidates, context_parallel_attention
from megatron_gptoss.context_parallel.layout import ContextLayout, balanced_layout

__all__ = ["AttentionShape", "ContextLayout", "Machine", "balanced_layout", "candidates", "context_parallel_attention"]
