"""Context parallelism: exact attention with sinks over tokens that are split over ranks.

The names exported here do not import torch, so that ``gptoss plan`` can use them. The modules
``attention`` and ``token_order`` do.
"""

from megatron_gptoss.context_parallel.cost_model import AttentionShape, HardwareRates, candidates
from megatron_gptoss.context_parallel.layout import ContextLayout, balanced_layout

__all__ = [
    "AttentionShape",
    "ContextLayout",
    "HardwareRates",
    "balanced_layout",
    "candidates",
]
