"""Names of Megatron parameters and of their Hugging Face tensors, for conversion and weight sync.

``parameter_mappings(config)`` is the name table. It has an entry for every Megatron parameter under
its *global* name, which numbers layers and experts over the whole model instead of one rank.
``global_name`` converts the names of every layer specification to this form. ``families`` has the
table of each model family.
"""

import re
from collections.abc import Callable, Iterable, Iterator

import torch

from converters.families.registry import get_family_tensors
from converters.mapping import NamedParts, NamedTensor, ParameterMapping, Shape
from megatron_gptoss.config import ModelConfig


def parameter_mappings(config: ModelConfig) -> dict[str, ParameterMapping]:
    """Return all parameters by global Megatron name, in model order.

    The experts that share a Hugging Face tensor are adjacent.

    Example:
        >>> from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
        >>> mappings = parameter_mappings(GptOssModelConfig(num_layers=1, num_experts=4))
        >>> mappings["decoder.layers.0.self_attention.linear_proj.weight"].hf_names
        ('model.layers.0.self_attn.o_proj.weight',)
    """
    return {mapping.name: mapping for mapping in get_family_tensors(config).mappings(config)}


def hf_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every Hugging Face tensor of a model.

    Example:
        >>> from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
        >>> shapes = hf_shapes(GptOssModelConfig(num_layers=24, num_experts=32))
        >>> shapes["model.layers.0.self_attn.sinks"], len(shapes)
        ((64,), 411)
    """
    shapes: dict[str, Shape] = {}
    for mapping in get_family_tensors(config).mappings(config):
        for name, shape in zip(mapping.hf_names, mapping.part_shapes, strict=True):
            # Hugging Face stacks the experts of a layer in one tensor.
            if mapping.expert is not None:
                shape = (config.num_experts, *shape)
            shapes[name] = shape
    return shapes


def hf_tensors(
    config: ModelConfig, get: Callable[[ParameterMapping], torch.Tensor], transposed: bool = False
) -> Iterator[NamedTensor]:
    """Yield (name, tensor) of every Hugging Face tensor, in the order of ``hf_shapes``.

    Args:
        config: model configuration.
        get: returns the full Megatron parameter. Called once per parameter, in order. The
            parameters of a layer's experts stay in memory until their tensor is complete.
        transposed: whether to yield expert matrices [experts, in, out] as transposed views of
            [experts, out, in]. Megatron stores them in this order, so no slow copy is needed.
    """
    parts = (
        (mapping, mapping.named_parts(get(mapping)))
        for mapping in get_family_tensors(config).mappings(config)
    )
    return stack_experts(config, parts, transposed)


def stack_experts(
    config: ModelConfig, parts: Iterable[NamedParts], transposed: bool = False
) -> Iterator[NamedTensor]:
    """Yield complete tensors [hf_shapes], in the dtypes of their parts.

    Args:
        config: model configuration.
        parts: parts of each parameter, in the order of the table.
        transposed: see ``hf_tensors``.
    """
    stacks: dict[str, torch.Tensor] = {}
    for mapping, named_parts in parts:
        if mapping.expert is None:
            for name, part in named_parts.items():
                yield name, part.contiguous()
            continue

        for name, part in named_parts.items():
            # The table lists experts in order, so the first one begins the stack.
            if mapping.expert == 0:
                stacks[name] = _empty_stack(part, config.num_experts, transposed)
            stacks[name][mapping.expert] = part

        # A weight and a bias are separate parameters, so a stack is complete after its last expert.
        if mapping.expert == config.num_experts - 1:
            yield from stacks.items()
            # Release the layer's experts before the next layer's are read.
            stacks = {}


def _empty_stack(part: torch.Tensor, experts: int, transposed: bool) -> torch.Tensor:
    """Return an uninitialized tensor [experts, *part.shape] for the parts of all experts.

    Args:
        part: tensor of one expert.
        experts: number of experts.
        transposed: see ``hf_tensors``.
    """
    # Biases of experts are vectors, which have no other orientation.
    if transposed and part.dim() == 2:
        return part.new_empty((experts, *part.mT.shape)).mT
    return part.new_empty((experts, *part.shape))


# -- names -------------------------------------------------------------------------------------

_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")


def global_name(local_name: str, layer_offset: int, expert_offset: int) -> str:
    """Return the global name of one rank's parameter: its key in ``parameter_mappings``.

    Supports the local and the Transformer Engine layer specification, SequentialMLP
    (``local_experts.{e}.linear_fc1.weight``) and TEGroupedMLP (``linear_fc1.weight{e}``).

    Args:
        local_name: name in ``named_parameters`` of a model chunk.
        layer_offset: number of layers in earlier pipeline stages.
        expert_offset: number of experts on earlier expert-parallel ranks.
    """
    # TEGroupedMLP has the expert's number at the end of the name, SequentialMLP in the middle.
    name = _GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\3.\1.\2", local_name)
    # The local specification has norms as separate modules. Transformer Engine fuses the norm
    # before attention into its projection, as the table does. In dense layers it also fuses the
    # norm before the MLP, which is separate in the table.
    name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    name = name.replace(".mlp.linear_fc1.layer_norm_weight", ".pre_mlp_layernorm.weight")
    name = re.sub(
        r"^decoder\.layers\.(\d+)\.",
        lambda match: f"decoder.layers.{int(match[1]) + layer_offset}.",
        name,
    )
    return re.sub(
        r"\.local_experts\.(\d+)\.",
        lambda match: f".local_experts.{int(match[1]) + expert_offset}.",
        name,
    )
