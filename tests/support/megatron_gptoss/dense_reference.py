"""Independent reference of dense decoders: transformers' LlamaForCausalLM and Qwen2ForCausalLM."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling

# All dimensions differ, so that a mix-up changes a shape.
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_size": 12,
    "vocab_size": 128,
    "max_length": 512,
}
LLAMA = DenseModelConfig(model_type="llama", rms_norm_eps=1e-5, **SIZES)
QWEN2 = DenseModelConfig(model_type="qwen2", rope_theta=1e6, **SIZES)
TIED = {"tie_word_embeddings": True}
MODELS: dict[str, DenseModelConfig] = {
    "llama": LLAMA,
    "llama, tied": LLAMA.model_copy(update=TIED),
    "qwen2": QWEN2,
    "qwen2, tied": QWEN2.model_copy(update=TIED),
    "llama 3's rope": LLAMA.model_copy(
        update={
            "rope_scaling": Llama3Scaling(factor=8, original_max_position_embeddings=16),
            "rope_theta": 500.0,
        }
    ),
    "qwen2.5's yarn": QWEN2.model_copy(
        update={"rope_scaling": YarnScaling(factor=4, original_max_position_embeddings=64)}
    ),
    "linear rope": LLAMA.model_copy(update={"rope_scaling": LinearScaling(factor=3)}),
    "head size of hidden / heads": LLAMA.model_copy(update={"head_size": 6}),
}


def dense_hf_model(config: DenseModelConfig, std: float = 0.15, seed: int = 0) -> Any:
    """Return an fp32 model with eager attention and random parameters, including biases."""
    torch.manual_seed(seed)
    hf_config = AutoConfig.for_model(**config.to_hf_config())
    model = AutoModelForCausalLM.from_config(
        hf_config, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, std)
            if "norm" in name:
                parameter.add_(1.0)
    return model.eval()


def dense_weights(config: DenseModelConfig, std: float = 0.15) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, without a tied output layer."""
    weights = dict(dense_hf_model(config, std).state_dict())
    if config.tied_embeddings:
        del weights["lm_head.weight"]
    return weights
