"""How a directory stores the tensors of GPT-OSS: under Hugging Face's or OpenAI's names, experts as floats or MXFP4.

    Hugging Face, bf16     gate_up_proj [E, in, out]
    Hugging Face, MXFP4    gate_up_proj_blocks [E, out, in / 32, 16] and _scales [E, out, in / 32]: output-major
    OpenAI                 block.N.mlp.mlp1_weight.blocks and .scales, likewise; query, key and value in one tensor

OpenAI's names and its order of rows are those of github.com/openai/gpt-oss, gpt_oss/torch/{weights,model}.py."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from converters.names import Shape, hf_shapes
from megatron_gptoss.config import ModelConfig

BLOCK = 32
"""Values that share an MXFP4 scale."""
_NOT_QUANTISED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
QUANTIZATION_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": _NOT_QUANTISED}
"""What config.json says of a model whose expert matrices are MXFP4."""
_OPENAI_OUTSIDE = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.scale",
    "lm_head.weight": "unembedding.weight",
}
_OPENAI_IN_LAYER = (
    (r"input_layernorm\.weight", "attn.norm.scale"),
    (r"self_attn\.sinks", "attn.sinks"),
    (r"self_attn\.[qkv]_proj", "attn.qkv"),
    (r"self_attn\.o_proj", "attn.out"),
    (r"post_attention_layernorm\.weight", "mlp.norm.scale"),
    (r"mlp\.router", "mlp.gate"),
    (r"mlp\.experts\.gate_up_proj_bias", "mlp.mlp1_bias"),
    (r"mlp\.experts\.gate_up_proj", "mlp.mlp1_weight"),
    (r"mlp\.experts\.down_proj_bias", "mlp.mlp2_bias"),
    (r"mlp\.experts\.down_proj", "mlp.mlp2_weight"),
)


@dataclass(frozen=True)
class Stored:
    """Where a directory keeps one Hugging Face tensor."""

    shapes: dict[str, Shape]
    """The tensor it is in; or two, the blocks and the scales of MXFP4."""
    rows: slice = slice(0, None)
    """Which rows of it."""
    output_major: bool = False
    """Stored as [E, out, in], where Hugging Face's bf16 layout has [E, in, out]."""


def is_expert_matrix(name: str) -> bool:
    return name.endswith(("gate_up_proj", "down_proj"))


def mxfp4_shapes(name: str, shape: Shape) -> dict[str, Shape]:
    """Blocks and scales of an expert matrix of Hugging Face [E, in, out]."""
    experts, inputs, outputs = shape
    scales = (experts, outputs, inputs // BLOCK)
    return {f"{name}_blocks": (*scales, BLOCK // 2), f"{name}_scales": scales}


def stored_tensors(config: ModelConfig, present: Collection[str]) -> dict[str, Stored]:
    """Where every Hugging Face tensor is in a directory that holds the tensors ``present``, or would have to be."""
    openai = "embedding.weight" in present
    result = {}
    heads, groups = config.num_attention_heads * config.head_size, config.num_key_value_heads * config.head_size
    rows = {"q": slice(0, heads), "k": slice(heads, heads + groups), "v": slice(heads + groups, heads + 2 * groups)}
    for name, shape in hf_shapes(config).items():
        base = openai_name(name) if openai else name
        if is_expert_matrix(name):
            quantised = mxfp4_shapes(base, shape)
            if openai:
                quantised = {re.sub("_(blocks|scales)$", r".\1", key): size for key, size in quantised.items()}
            if any(key in present for key in quantised):
                result[name] = Stored(quantised, output_major=True)
            else:
                whole = (shape[0], shape[2], shape[1]) if openai else shape
                result[name] = Stored({base: whole}, output_major=openai)
        elif openai and base.endswith(("qkv.weight", "qkv.bias")):
            which = name.split(".self_attn.")[1][0]
            result[name] = Stored({base: (heads + 2 * groups, *shape[1:])}, rows[which])
        else:
            result[name] = Stored({base: shape})
    return result


def openai_name(name: str) -> str:
    """OpenAI's name of a Hugging Face tensor (of q, k and v: of the tensor they are all in)."""
    if name in _OPENAI_OUTSIDE:
        return _OPENAI_OUTSIDE[name]
    name = re.sub(r"^model\.layers\.", "block.", name)
    for pattern, replacement in _OPENAI_IN_LAYER:
        name, count = re.subn(rf"(?<=\d\.){pattern}(?=\.|$)", replacement, name)
        if count:
            break
    return name


def openai_config(raw: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's config.json in Hugging Face's keys. KeyError names a missing key."""
    length, factor = raw["initial_context_length"], raw["rope_scaling_factor"]
    return {
        **{key: value for key, value in raw.items() if not key.startswith("rope_")},
        "model_type": "gpt_oss",
        "num_local_experts": raw["num_experts"],
        "num_experts_per_tok": raw["experts_per_token"],
        "rope_theta": raw["rope_theta"],
        "rope_scaling": {
            "factor": factor,
            "beta_slow": raw["rope_ntk_alpha"],
            "beta_fast": raw["rope_ntk_beta"],
            "original_max_position_embeddings": length,
            "truncate": False,
        },
        "max_position_embeddings": int(length * factor),
    }
