"""Causal attention over packed sequences with one learnable sink logit per query head."""

from gptoss_kernels.sink_attention.api import sink_attention
from gptoss_kernels.sink_attention.dispatch import BACKENDS, describe

__all__ = ["BACKENDS", "describe", "sink_attention"]
