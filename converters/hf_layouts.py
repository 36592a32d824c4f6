"""Storage layouts of GPT-OSS tensors: Hugging Face's or OpenAI's names, floats or MXFP4.

    Hugging Face, bf16     gate_up_proj [E, in, out]
    Hugging Face, MXFP4    gate_up_proj_blocks [E, out, in / 32, 16] and _scales [E, out, in / 32]
    OpenAI                 block.N.mlp.mlp1_weight.blocks and .scales; q, k and v in one tensor

MXFP4 is output-major in both. OpenAI's names and row order are those of
github.com/openai/gpt-oss, gpt_oss/torch/{weights,model}.py.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from converters.mapping import Shape
from converters.names import hf_shapes
from megatron_gptoss.config import ModelConfig

BLOCK = 32
"""Values per MXFP4 scale."""
_NOT_QUANTIZED = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]
QUANTIZATION_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": _NOT_QUANTIZED}
"""Value of ``quantization_config`` in config.json for a model with MXFP4 expert matrices."""
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
"""Pairs of a pattern that follows ``model.layers.N.`` and OpenAI's name after ``block.N.``."""


@dataclass(frozen=True)
class StoredTensor:
    """Place of one Hugging Face tensor in a directory."""

    shapes: dict[str, Shape]
    """Shape of each stored tensor, by name: one tensor, or the blocks and the scales of MXFP4."""
    rows: slice = slice(0, None)
    """Rows of the stored tensor that belong to the Hugging Face tensor; all by default."""
    output_major: bool = False
    """True if stored as [E, out, in] instead of Hugging Face's bf16 layout [E, in, out]."""

    @property
    def names(self) -> list[str]:
        """Names of the stored tensors."""
        return list(self.shapes)

    @property
    def is_mxfp4(self) -> bool:
        """True if stored as MXFP4 blocks and scales."""
        return len(self.shapes) == 2


def is_expert_matrix(name: str) -> bool:
    """Return True if a Hugging Face tensor holds expert matrices, which MXFP4 quantizes."""
    # Biases end in _bias. A dense model's down_proj ends in .weight.
    return name.endswith(("gate_up_proj", "down_proj"))


def mxfp4_shapes(name: str, shape: Shape) -> dict[str, Shape]:
    """Return the stored shapes of an expert matrix in MXFP4, by stored name.

    Args:
        name: Hugging Face name of the matrix.
        shape: its bf16 shape [E, in, out].

    Returns:
        ``NAME_blocks`` [E, out, in / 32, 16] and ``NAME_scales`` [E, out, in / 32].
    """
    experts, inputs, outputs = shape
    scales_shape = (experts, outputs, inputs // BLOCK)
    return {f"{name}_blocks": (*scales_shape, BLOCK // 2), f"{name}_scales": scales_shape}


def stored_tensors(config: ModelConfig, present: Collection[str]) -> dict[str, StoredTensor]:
    """Return the expected place of every Hugging Face tensor, by Hugging Face name.

    Args:
        config: model configuration.
        present: names of the tensors in the directory. They decide between the layouts.
    """
    # Hugging Face's names begin with "model.", so this one identifies OpenAI's format.
    openai = "embedding.weight" in present
    result = {}
    for name, shape in hf_shapes(config).items():
        if is_expert_matrix(name):
            result[name] = _stored_expert_matrix(name, shape, present, openai)
        elif openai:
            result[name] = _stored_by_openai(config, name, shape)
        else:
            result[name] = StoredTensor({name: shape})
    return result


def _stored_expert_matrix(
    name: str, shape: Shape, present: Collection[str], openai: bool
) -> StoredTensor:
    """Return the place of an expert matrix: MXFP4 if its blocks or scales are ``present``."""
    if openai:
        name = openai_name(name)
    stored_shapes = mxfp4_shapes(name, shape)
    if openai:
        # OpenAI separates the suffix with a dot: mlp1_weight.blocks.
        stored_shapes = {
            re.sub("_(blocks|scales)$", r".\1", key): stored_shape
            for key, stored_shape in stored_shapes.items()
        }

    # If only the blocks or only the scales are present, report the other as missing.
    if any(key in present for key in stored_shapes):
        return StoredTensor(stored_shapes, output_major=True)
    if openai:
        # OpenAI's bf16 matrices are output-major, unlike Hugging Face's.
        experts, inputs, outputs = shape
        return StoredTensor({name: (experts, outputs, inputs)}, output_major=True)
    return StoredTensor({name: shape})


def _stored_by_openai(config: ModelConfig, name: str, shape: Shape) -> StoredTensor:
    """Return the place of a tensor in OpenAI's format, where query, key and value share one."""
    stored_name = openai_name(name)
    if not stored_name.endswith(("qkv.weight", "qkv.bias")):
        return StoredTensor({stored_name: shape})

    # OpenAI stacks all queries, then all keys, then all values along the rows.
    query_rows = config.num_attention_heads * config.head_size
    key_rows = config.num_key_value_heads * config.head_size
    first_value_row = query_rows + key_rows
    rows = {
        "q": slice(0, query_rows),
        "k": slice(query_rows, first_value_row),
        "v": slice(first_value_row, first_value_row + key_rows),
    }
    # The names end in q_proj, k_proj or v_proj.
    letter = name.split(".self_attn.")[1][0]
    return StoredTensor({stored_name: (first_value_row + key_rows, *shape[1:])}, rows[letter])


def openai_name(name: str) -> str:
    """Return OpenAI's name of a Hugging Face tensor; q, k and v map to the same name."""
    if name in _OPENAI_OUTSIDE:
        return _OPENAI_OUTSIDE[name]

    name = re.sub(r"^model\.layers\.", "block.", name)
    for pattern, replacement in _OPENAI_IN_LAYER:
        # Match whole components: gate_up_proj is also the start of gate_up_proj_bias.
        renamed, count = re.subn(rf"(?<=\d\.){pattern}(?=\.|$)", replacement, name)
        if count:
            return renamed
    return name
