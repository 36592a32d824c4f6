"""Options of upcycling, and the architecture of the new model."""

import math
from dataclasses import dataclass

from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig


@dataclass(frozen=True)
class UpcycleOptions:
    """Properties of the GPT-OSS model that the dense model does not have."""

    num_experts: int = 4
    """Experts per layer."""
    experts_per_token: int = 2
    """Experts to which each token is routed."""
    sliding_window: int = 128
    """Keys that a token sees in layers 0, 2, 4, ... The dense model sees all of them."""
    sink: float = 0.0
    """Initial sink logit of every head. -30 gives the sink a probability of almost 0."""
    expert_noise: float = 0.03
    """Standard deviation of the noise on every expert's copy of a dense matrix, relative to that of
    the matrix.

    Equal experts would get equal gradients, and stay equal.
    """
    router_std: float = 0.02
    """Standard deviation of the router's random weights."""
    seed: int = 0
    """Seed of noise and router."""
    harmony: bool = False
    """Rename unused added tokens of a ChatML tokenizer to Harmony's special tokens."""


def upcycled_config(source: HfDirectory, options: UpcycleOptions) -> GptOssModelConfig:
    """Return the architecture of the upcycled model.

    Raises:
        ConversionError: if the source is not dense, or its rotary embedding is not plain.
    """
    dense = source.config
    where = source.path / "config.json"
    if not isinstance(dense, DenseModelConfig):
        raise ConversionError(
            f"{where}: model_type is {dense.model_type}, but only dense models can be upcycled. Use a "
            "Llama or Qwen2 model"
        )
    if dense.rope_scaling is not None:
        raise ConversionError(
            f"{where}: rope_scaling has rope_type {dense.rope_scaling.rope_type!r}, which GPT-OSS cannot "
            "represent. Use a model without rope_scaling"
        )
    if options.experts_per_token > options.num_experts:
        raise ConversionError(
            f"experts_per_token ({options.experts_per_token}) exceeds num_experts "
            f"({options.num_experts}). Lower experts_per_token"
        )

    # GPT-OSS always uses YaRN. With these bounds, its ramp covers no channel, so all frequencies stay
    # unchanged. A ramp over some channels would round them, even with factor 1.
    rotations_of_slowest = dense.max_length / (2 * math.pi * dense.rope_theta)
    return GptOssModelConfig(
        num_layers=dense.num_layers,
        num_experts=options.num_experts,
        experts_per_token=options.experts_per_token,
        hidden_size=dense.hidden_size,
        intermediate_size=dense.intermediate_size,
        num_attention_heads=dense.num_attention_heads,
        num_key_value_heads=dense.num_key_value_heads,
        head_size=dense.head_size,
        vocab_size=dense.vocab_size,
        sliding_window=options.sliding_window,
        rms_norm_eps=dense.rms_norm_eps,
        rope_theta=dense.rope_theta,
        # Factor 1 also makes YaRN's factor of cos and sin, 0.1 ln(factor) + 1, equal to 1.
        yarn_factor=1.0,
        yarn_original_length=dense.max_length,
        yarn_beta_fast=rotations_of_slowest,
        yarn_beta_slow=rotations_of_slowest / math.sqrt(dense.rope_theta),
        max_length=dense.max_length,
        initializer_std=dense.initializer_std,
    )
