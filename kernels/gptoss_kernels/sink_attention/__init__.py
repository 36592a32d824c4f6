"""Causal attention over packed sequences with one learnable sink logit per query head."""

from gptoss_kernels.sink_attention.api import BACKENDS, sink_attention

__all__ = ["BACKENDS", "sink_attention"]
