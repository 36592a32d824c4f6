"""The name table of import, export and weight sync: which Megatron parameter holds which tensor.

Pure data and pure functions, no process groups and no files. ``parameter_mappings(config)`` has one
entry for every Megatron parameter under its *global* name: layers and experts are numbered over the
model, not over one rank. Names are those of Megatron's SequentialMLP and of the layer norm that
Transformer Engine fuses into the QKV projection; ``global_name`` brings the names of the other
layer specifications to this form.

Layouts that differ between the two sides:

* QKV: Megatron keeps one matrix, per key/value group its query heads, then its key head, then its
  value head. Split evenly along dim 0 it gives every tensor-parallel rank complete groups, as long
  as the ranks divide the groups.
* Experts: Hugging Face keeps one tensor for all experts, input-major ([E, in, out]), gate and up
  channels alternating. Megatron keeps each expert apart, output-major ([out, in]), first all gate
  channels, then all up channels. In the released models down_proj is square, so that a forgotten
  transpose would pass every check of shapes.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from megatron_gptoss.config import ModelConfig

Shape = tuple[int, ...]
Parts = tuple[torch.Tensor, ...]
NamedTensor = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class ParameterMapping:
    """One Megatron parameter and the Hugging Face tensors (or slices of them) that it holds."""

    name: str
    """Global Megatron name, such as ``decoder.layers.3.self_attention.linear_qkv.weight``."""
    shape: Shape
    """Full shape, over all tensor-parallel ranks."""
    hf_names: tuple[str, ...]
    """Hugging Face tensors it is made of."""
    part_shapes: tuple[Shape, ...]
    """Shape of each part: of the Hugging Face tensor, or of one expert's slice of it."""
    tensor_parallel_dim: int | None
    """Dimension that tensor-parallel ranks split evenly; None if each rank holds all of it. Experts
    are never split."""
    layer: int | None
    """0-based layer; None outside the layers."""
    expert: int | None
    """Index of the slice along dim 0 of the Hugging Face tensors; None if it takes all of them."""
    checkpoint_key: str
    """Key of the tensor in torch_dist checkpoints that stacks this parameter over all layers (and
    experts)."""
    to_megatron: Callable[..., torch.Tensor]
    """(*parts) -> the Megatron tensor [shape]."""
    to_hf: Callable[[torch.Tensor], Parts]
    """The Megatron tensor -> its parts."""

    @property
    def checkpoint_index(self) -> Shape:
        """Place in the leading axes of the torch_dist tensor: (), (layer,) or (layer, expert)."""
        return tuple(i for i in (self.layer, self.expert) if i is not None)

    @property
    def is_unchanged(self) -> bool:
        """Whether the parameter equals one complete Hugging Face tensor."""
        return self.expert is None and self.to_megatron is _same

    @property
    def bf16_bytes(self) -> int:
        """Size in bf16, the unit of progress."""
        return 2 * math.prod(self.shape)

    def named_parts(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split the Megatron tensor as ``to_hf`` does; by Hugging Face name."""
        return dict(zip(self.hf_names, self.to_hf(tensor), strict=True))

    def local_shape(self, ranks: int) -> Shape:
        """Return the shape on one of ``ranks`` tensor-parallel ranks."""
        if self.tensor_parallel_dim is None:
            return self.shape

        local = list(self.shape)
        local[self.tensor_parallel_dim] //= ranks
        return tuple(local)

    def shard(self, full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """Return the view of ``full`` that tensor-parallel ``rank`` of ``ranks`` holds."""
        if self.tensor_parallel_dim is None:
            return full
        return full.chunk(ranks, self.tensor_parallel_dim)[rank]

    def unshard(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """Join the shards of all tensor-parallel ranks, in order, to the full parameter."""
        if self.tensor_parallel_dim is None or len(shards) == 1:
            return shards[0]
        return torch.cat(shards, self.tensor_parallel_dim)


NamedParts = tuple[ParameterMapping, dict[str, torch.Tensor]]

# -- the table ---------------------------------------------------------------------------------


def parameter_mappings(config: ModelConfig) -> dict[str, ParameterMapping]:
    """Return all parameters by global Megatron name, in model order.

    The experts that share a Hugging Face tensor follow one another.
    """
    return {mapping.name: mapping for mapping in _mappings(config)}


def hf_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the complete list of Hugging Face tensors with their shapes."""
    shapes: dict[str, Shape] = {}
    for mapping in _mappings(config):
        for name, shape in zip(mapping.hf_names, mapping.part_shapes, strict=True):
            if mapping.expert is not None:
                shape = (config.num_experts, *shape)
            shapes[name] = shape
    return shapes


def hf_tensors(
    config: ModelConfig, get: Callable[[ParameterMapping], torch.Tensor], transposed: bool = False
) -> Iterator[NamedTensor]:
    """Yield every Hugging Face tensor by name, one at a time, in the order of ``hf_shapes``.

    Args:
        config: of the model.
        get: returns the full Megatron parameter; asked for one after the other. The parameters of a
            layer's experts are held together until their tensor is complete.
        transposed: experts' matrices are views of [experts, out, in], as Megatron has them in
            memory, which saves a slow copy.
    """
    parts = ((mapping, mapping.named_parts(get(mapping))) for mapping in _mappings(config))
    return stack_experts(config, parts, transposed)


def stack_experts(
    config: ModelConfig, parts: Iterable[NamedParts], transposed: bool = False
) -> Iterator[NamedTensor]:
    """Yield complete tensors from each parameter's parts, which come in the order of the table."""
    stacks: dict[str, torch.Tensor] = {}
    for mapping, named_parts in parts:
        if mapping.expert is None:
            for name, part in named_parts.items():
                yield name, part.contiguous()
            continue

        for name, part in named_parts.items():
            if mapping.expert == 0:
                stacks[name] = _empty_stack(part, config.num_experts, transposed)
            stacks[name][mapping.expert] = part

        # weight and bias are different parameters: each stack is complete with its last expert
        if mapping.expert == config.num_experts - 1:
            yield from stacks.items()
            stacks = {}


def _empty_stack(part: torch.Tensor, experts: int, transposed: bool) -> torch.Tensor:
    """Return room for [experts, *part.shape]; of a transposed matrix, a view."""
    if transposed and part.dim() == 2:
        return part.new_empty((experts, *part.mT.shape)).mT
    return part.new_empty((experts, *part.shape))


def _mappings(config: ModelConfig) -> Iterator[ParameterMapping]:
    hidden = config.hidden_size
    vocabulary = config.vocab_size

    yield _unchanged(
        "embedding.word_embeddings.weight",
        "model.embed_tokens.weight",
        (vocabulary, hidden),
        tensor_parallel_dim=0,
    )
    for layer in range(config.num_layers):
        yield from _attention_mappings(config, layer)
        yield from _mlp_mappings(config, layer)
    yield _unchanged("decoder.final_layernorm.weight", "model.norm.weight", (hidden,))
    yield _unchanged(
        "output_layer.weight", "lm_head.weight", (vocabulary, hidden), tensor_parallel_dim=0
    )


def _attention_mappings(config: ModelConfig, layer: int) -> Iterator[ParameterMapping]:
    hidden = config.hidden_size
    query_rows = config.num_attention_heads * config.head_size
    key_rows = config.num_key_value_heads * config.head_size
    merge = partial(merge_qkv, groups=config.num_key_value_heads)
    split = partial(split_qkv, groups=config.num_key_value_heads, head_size=config.head_size)
    unchanged = partial(_unchanged_in_layer, layer)

    yield unchanged(
        "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", (hidden,)
    )
    for kind, tail in (("weight", (hidden,)), ("bias", ())):
        yield ParameterMapping(
            name=f"decoder.layers.{layer}.self_attention.linear_qkv.{kind}",
            shape=(query_rows + 2 * key_rows, *tail),
            hf_names=tuple(f"model.layers.{layer}.self_attn.{x}_proj.{kind}" for x in "qkv"),
            part_shapes=((query_rows, *tail), (key_rows, *tail), (key_rows, *tail)),
            tensor_parallel_dim=0,
            layer=layer,
            expert=None,
            checkpoint_key=f"decoder.layers.self_attention.linear_qkv.{kind}",
            to_megatron=merge,
            to_hf=split,
        )
    yield unchanged(
        "self_attention.core_attention.softmax_offset",
        "self_attn.sinks",
        (config.num_attention_heads,),
        tensor_parallel_dim=0,
    )
    yield unchanged(
        "self_attention.linear_proj.weight",
        "self_attn.o_proj.weight",
        (hidden, query_rows),
        tensor_parallel_dim=1,
    )
    yield unchanged("self_attention.linear_proj.bias", "self_attn.o_proj.bias", (hidden,))


def _mlp_mappings(config: ModelConfig, layer: int) -> Iterator[ParameterMapping]:
    hidden = config.hidden_size
    intermediate = config.intermediate_size
    experts = config.num_experts
    unchanged = partial(_unchanged_in_layer, layer)

    yield unchanged("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", (hidden,))
    yield unchanged("mlp.router.weight", "mlp.router.weight", (experts, hidden))
    yield unchanged("mlp.router.bias", "mlp.router.bias", (experts,))
    yield from _expert_mappings(
        config,
        layer,
        name="linear_fc1.weight",
        hf_name="gate_up_proj",
        shape=(2 * intermediate, hidden),
        part_shape=(hidden, 2 * intermediate),
        to_megatron=_fc1_weight,
        to_hf=_gate_up_proj,
    )
    yield from _expert_mappings(
        config,
        layer,
        name="linear_fc1.bias",
        hf_name="gate_up_proj_bias",
        shape=(2 * intermediate,),
        part_shape=(2 * intermediate,),
        to_megatron=separate_gate_up,
        to_hf=interleave_gate_up,
    )
    yield from _expert_mappings(
        config,
        layer,
        name="linear_fc2.weight",
        hf_name="down_proj",
        shape=(hidden, intermediate),
        part_shape=(intermediate, hidden),
        to_megatron=_transpose,
        to_hf=_transpose,
    )
    yield from _expert_mappings(
        config,
        layer,
        name="linear_fc2.bias",
        hf_name="down_proj_bias",
        shape=(hidden,),
        part_shape=(hidden,),
        to_megatron=_same,
        to_hf=_same,
    )


def _expert_mappings(
    config: ModelConfig,
    layer: int,
    *,
    name: str,
    hf_name: str,
    shape: Shape,
    part_shape: Shape,
    to_megatron: Callable[[torch.Tensor], torch.Tensor],
    to_hf: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[ParameterMapping]:
    """Yield one parameter per expert; names are without the experts' common prefix."""
    for expert in range(config.num_experts):
        yield ParameterMapping(
            name=f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.{name}",
            shape=shape,
            hf_names=(f"model.layers.{layer}.mlp.experts.{hf_name}",),
            part_shapes=(part_shape,),
            tensor_parallel_dim=None,
            layer=layer,
            expert=expert,
            checkpoint_key=f"decoder.layers.mlp.experts.experts.{name}",
            to_megatron=to_megatron,
            to_hf=_single_part(to_hf),
        )


def _unchanged(
    name: str, hf_name: str, shape: Shape, tensor_parallel_dim: int | None = None
) -> ParameterMapping:
    """Map a parameter outside the layers that equals one Hugging Face tensor."""
    return ParameterMapping(
        name=name,
        shape=shape,
        hf_names=(hf_name,),
        part_shapes=(shape,),
        tensor_parallel_dim=tensor_parallel_dim,
        layer=None,
        expert=None,
        checkpoint_key=name,
        to_megatron=_same,
        to_hf=_single_part(_same),
    )


def _unchanged_in_layer(
    layer: int, name: str, hf_name: str, shape: Shape, tensor_parallel_dim: int | None = None
) -> ParameterMapping:
    """Map a layer's parameter that equals one Hugging Face tensor; names are without its prefix."""
    return ParameterMapping(
        name=f"decoder.layers.{layer}.{name}",
        shape=shape,
        hf_names=(f"model.layers.{layer}.{hf_name}",),
        part_shapes=(shape,),
        tensor_parallel_dim=tensor_parallel_dim,
        layer=layer,
        expert=None,
        checkpoint_key=f"decoder.layers.{name}",
        to_megatron=_same,
        to_hf=_single_part(_same),
    )


# -- names -------------------------------------------------------------------------------------

_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")


def global_name(local_name: str, layer_offset: int, expert_offset: int) -> str:
    """Return the key in ``parameter_mappings`` of a parameter that one rank calls ``local_name``.

    Understands the local and the Transformer Engine layer specification, SequentialMLP
    (``local_experts.{e}.linear_fc1.weight``) and TEGroupedMLP (``linear_fc1.weight{e}``).

    Args:
        local_name: as ``named_parameters`` of a model chunk has it.
        layer_offset: layers of earlier pipeline stages.
        expert_offset: experts of earlier expert-parallel ranks.
    """
    # TEGroupedMLP numbers experts at the end of the name, SequentialMLP in its middle.
    name = _GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\3.\1.\2", local_name)
    # The local specification has the norm as a module of its own.
    name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
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


# -- transforms --------------------------------------------------------------------------------


def merge_qkv(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, groups: int
) -> torch.Tensor:
    """Merge into Megatron's QKV, group by group.

    Args:
        query: [heads * head_size, ...].
        key: [groups * head_size, ...].
        value: [groups * head_size, ...].
        groups: key/value heads.

    Returns:
        [(heads + 2 * groups) * head_size, ...].
    """
    tail = query.shape[1:]
    # a group's query heads, its key head, its value head: [groups, rows, ...]
    per_group = [x.reshape(groups, -1, *tail) for x in (query, key, value)]
    return torch.cat(per_group, dim=1).reshape(-1, *tail)


def split_qkv(qkv: torch.Tensor, *, groups: int, head_size: int) -> Parts:
    """Invert ``merge_qkv``."""
    tail = qkv.shape[1:]
    per_group = qkv.reshape(groups, -1, *tail)
    # a group ends with one key head and one value head
    query_rows = per_group.shape[1] - 2 * head_size
    parts = per_group.split([query_rows, head_size, head_size], dim=1)
    return tuple(part.reshape(-1, *tail) for part in parts)


def separate_gate_up(gate_up: torch.Tensor) -> torch.Tensor:
    """Reorder channels gate 0, up 0, gate 1, ... along dim 0 to all gates, then all ups."""
    return torch.cat([gate_up[0::2], gate_up[1::2]])


def interleave_gate_up(gate_up: torch.Tensor) -> torch.Tensor:
    """Invert ``separate_gate_up``."""
    gate, up = gate_up.chunk(2)
    return torch.stack([gate, up], dim=1).flatten(0, 1)


# Rows are channels only after the transpose to [out, in]; the inverse takes the steps backwards.
def _fc1_weight(gate_up_proj: torch.Tensor) -> torch.Tensor:
    return separate_gate_up(gate_up_proj.T)


def _gate_up_proj(fc1_weight: torch.Tensor) -> torch.Tensor:
    return interleave_gate_up(fc1_weight).T


def _transpose(part: torch.Tensor) -> torch.Tensor:
    return part.T


def _same(part: torch.Tensor) -> torch.Tensor:
    return part


def _single_part(
    transform: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], Parts]:
    """Turn a transform of a parameter that has one part into a ``to_hf``."""
    return lambda tensor: (transform(tensor),)
