"""Which Megatron parameter holds which Hugging Face tensor: the one name table of import, export and weight sync.

Pure data and pure functions, no process groups and no files. ``parameter_mappings(config)`` has one entry for every
Megatron parameter under its *global* name: layers and experts numbered over the whole model, not over one rank. Names
are those of Megatron's SequentialMLP and of the layer norm that Transformer Engine fuses into the QKV projection;
``global_name`` brings the names of the other layer specifications to this form.

Layouts that differ between the two sides:

* QKV: Megatron keeps one matrix, per key/value group its query heads, then its key head, then its value head. Split
  evenly along dim 0 it gives every tensor-parallel rank whole groups, as long as the ranks divide the groups.
* Experts: Hugging Face keeps one tensor for all experts, input-major ([E, in, out]), gate and up channels alternating.
  Megatron keeps each expert apart, output-major ([out, in]), first all gate channels, then all up channels. In the
  released models down_proj is square, so that a forgotten transpose would pass every check of shapes."""

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
    """One whole Megatron parameter and the Hugging Face tensors (or, of experts, their ``expert``-th slices) in it."""

    name: str
    """Global Megatron name, such as ``decoder.layers.3.self_attention.linear_qkv.weight``."""
    shape: Shape
    """Full shape, over all tensor-parallel ranks."""
    hf_names: tuple[str, ...]
    """Hugging Face tensors it is made of."""
    part_shapes: tuple[Shape, ...]
    """Shape of each part: of the Hugging Face tensor, or of one expert's slice of it."""
    tensor_parallel_dim: int | None
    """Dimension that tensor-parallel ranks split evenly; None if each holds the whole. Experts are never split."""
    layer: int | None
    """0-based layer; None outside the layers."""
    expert: int | None
    """Index of the slice along dim 0 of the Hugging Face tensors; None if they are taken whole."""
    checkpoint_key: str
    """Key of the tensor in torch_dist checkpoints that stacks this parameter over all layers (and experts)."""
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
        """Whether it is a whole Hugging Face tensor as it is."""
        return self.expert is None and self.to_megatron is _same

    def named_parts(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """``to_hf`` by Hugging Face name."""
        return dict(zip(self.hf_names, self.to_hf(tensor), strict=True))

    def local_shape(self, ranks: int) -> Shape:
        """Shape on one of ``ranks`` tensor-parallel ranks."""
        d = self.tensor_parallel_dim
        return tuple(size // ranks if i == d else size for i, size in enumerate(self.shape))

    def shard(self, full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """What tensor-parallel ``rank`` of ``ranks`` holds of the ``full`` parameter; a view."""
        d = self.tensor_parallel_dim
        return full if d is None else full.chunk(ranks, d)[rank]

    def unshard(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """The full parameter from the shards of all tensor-parallel ranks, in order."""
        d = self.tensor_parallel_dim
        return shards[0] if d is None or len(shards) == 1 else torch.cat(shards, d)


NamedParts = tuple[ParameterMapping, dict[str, torch.Tensor]]

# -- the table --------------------------------------------------------------------------------------------------------


def parameter_mappings(config: ModelConfig) -> dict[str, ParameterMapping]:
    """All parameters by global Megatron name, in model order; the experts that share a tensor follow one another."""
    return {mapping.name: mapping for mapping in _mappings(config)}


def hf_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The complete list of Hugging Face tensors with their shapes."""
    shapes: dict[str, Shape] = {}
    for mapping in _mappings(config):
        for name, shape in zip(mapping.hf_names, mapping.part_shapes, strict=True):
            shapes[name] = shape if mapping.expert is None else (config.num_experts, *shape)
    return shapes


def hf_tensors(
    config: ModelConfig, get: Callable[[ParameterMapping], torch.Tensor], transposed: bool = False
) -> Iterator[NamedTensor]:
    """Every Hugging Face tensor by name, built from full Megatron parameters that ``get`` is asked for one by one.

    Holds one at a time; of a layer's experts that is all of them. ``transposed``: their weights are views of what lies
    in memory as Megatron has it, [experts, out, in], which saves a slow copy."""
    named = ((mapping, mapping.named_parts(get(mapping))) for mapping in _mappings(config))
    return stack_experts(config, named, transposed)


def stack_experts(config: ModelConfig, parts: Iterable[NamedParts], transposed: bool = False) -> Iterator[NamedTensor]:
    """Whole tensors from the named parts of each parameter, which come in the order of the table."""
    stacks: dict[str, torch.Tensor] = {}
    for mapping, named in parts:
        if mapping.expert is None:
            yield from ((name, part.contiguous()) for name, part in named.items())
            continue
        for name, part in named.items():
            if mapping.expert == 0:
                stack = part.new_empty((config.num_experts, *part.shape[:: -1 if transposed else 1]))
                stacks[name] = stack.mT if transposed and part.dim() == 2 else stack
            stacks[name][mapping.expert] = part
        if mapping.expert == config.num_experts - 1:
            yield from stacks.items()
            stacks = {}


def _mappings(config: ModelConfig) -> Iterator[ParameterMapping]:
    h, i, v = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_size
    q, kv = heads * d, groups * d
    experts = config.num_experts
    merge, split = partial(merge_qkv, groups=groups), partial(split_qkv, groups=groups, head_size=d)

    yield _whole("embedding.word_embeddings.weight", "model.embed_tokens.weight", (v, h), 0)
    for layer in range(config.num_layers):
        m, hf, whole = f"decoder.layers.{layer}.", f"model.layers.{layer}.", partial(_whole, layer=layer)
        yield whole("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", (h,))
        for kind, tail in (("weight", (h,)), ("bias", ())):
            yield ParameterMapping(
                name=f"{m}self_attention.linear_qkv.{kind}",
                shape=(q + 2 * kv, *tail),
                hf_names=tuple(f"{hf}self_attn.{x}_proj.{kind}" for x in "qkv"),
                part_shapes=((q, *tail), (kv, *tail), (kv, *tail)),
                tensor_parallel_dim=0,
                layer=layer,
                expert=None,
                checkpoint_key=f"decoder.layers.self_attention.linear_qkv.{kind}",
                to_megatron=merge,
                to_hf=split,
            )
        yield whole("self_attention.core_attention.softmax_offset", "self_attn.sinks", (heads,), 0)
        yield whole("self_attention.linear_proj.weight", "self_attn.o_proj.weight", (h, q), 1)
        yield whole("self_attention.linear_proj.bias", "self_attn.o_proj.bias", (h,))
        yield whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", (h,))
        yield whole("mlp.router.weight", "mlp.router.weight", (experts, h))
        yield whole("mlp.router.bias", "mlp.router.bias", (experts,))
        for name, hf_name, shape, part_shape, to_megatron, to_hf in (
            ("linear_fc1.weight", "gate_up_proj", (2 * i, h), (h, 2 * i), _fc1_weight, _gate_up_proj),
            ("linear_fc1.bias", "gate_up_proj_bias", (2 * i,), (2 * i,), separate_gate_up, interleave_gate_up),
            ("linear_fc2.weight", "down_proj", (h, i), (i, h), _transpose, _transpose),
            ("linear_fc2.bias", "down_proj_bias", (h,), (h,), _same, _same),
        ):
            for expert in range(experts):
                yield ParameterMapping(
                    name=f"{m}mlp.experts.local_experts.{expert}.{name}",
                    shape=shape,
                    hf_names=(f"{hf}mlp.experts.{hf_name}",),
                    part_shapes=(part_shape,),
                    tensor_parallel_dim=None,
                    layer=layer,
                    expert=expert,
                    checkpoint_key=f"decoder.layers.mlp.experts.experts.{name}",
                    to_megatron=to_megatron,
                    to_hf=_alone(to_hf),
                )
    yield _whole("decoder.final_layernorm.weight", "model.norm.weight", (h,), None)
    yield _whole("output_layer.weight", "lm_head.weight", (v, h), 0)


def _whole(name: str, hf_name: str, shape: Shape, tp: int | None = None, layer: int | None = None) -> ParameterMapping:
    """One that is a Hugging Face tensor as it is; of a ``layer`` both names are without its prefix."""
    key = name if layer is None else f"decoder.layers.{name}"
    if layer is not None:
        name, hf_name = f"decoder.layers.{layer}.{name}", f"model.layers.{layer}.{hf_name}"
    return ParameterMapping(name, shape, (hf_name,), (shape,), tp, layer, None, key, _same, _alone(_same))


# -- names ------------------------------------------------------------------------------------------------------------

_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")


def global_name(local_name: str, layer_offset: int, expert_offset: int) -> str:
    """Key in ``parameter_mappings`` of a parameter that one rank calls ``local_name``.

    ``layer_offset`` and ``expert_offset`` count the layers of earlier pipeline stages and the experts of earlier
    expert-parallel ranks. Understands the local and the Transformer Engine layer specification, SequentialMLP
    (``local_experts.{e}.linear_fc1.weight``) and TEGroupedMLP (``linear_fc1.weight{e}``)."""
    name = _GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\3.\1.\2", local_name)
    name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    name = re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{int(m[1]) + layer_offset}.", name)
    return re.sub(r"\.local_experts\.(\d+)\.", lambda m: f".local_experts.{int(m[1]) + expert_offset}.", name)


# -- transforms -------------------------------------------------------------------------------------------------------


def merge_qkv(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, groups: int) -> torch.Tensor:
    """query [heads * head_size, ...], key and value [groups * head_size, ...] -> Megatron's QKV, group by group."""
    tail = query.shape[1:]
    per_group = [x.reshape(groups, -1, *tail) for x in (query, key, value)]
    return torch.cat(per_group, dim=1).reshape(-1, *tail)


def split_qkv(qkv: torch.Tensor, *, groups: int, head_size: int) -> Parts:
    """Inverse of ``merge_qkv``."""
    tail = qkv.shape[1:]
    per_group = qkv.reshape(groups, -1, *tail)
    sizes = [per_group.shape[1] - 2 * head_size, head_size, head_size]
    return tuple(part.reshape(-1, *tail) for part in per_group.split(sizes, dim=1))


def separate_gate_up(gate_up: torch.Tensor) -> torch.Tensor:
    """Alternating channels gate 0, up 0, gate 1, ... along dim 0 -> all gates, then all ups."""
    return torch.cat([gate_up[0::2], gate_up[1::2]])


def interleave_gate_up(gate_up: torch.Tensor) -> torch.Tensor:
    """Inverse of ``separate_gate_up``."""
    gate, up = gate_up.chunk(2)
    return torch.stack([gate, up], dim=1).flatten(0, 1)


def _fc1_weight(gate_up_proj: torch.Tensor) -> torch.Tensor:
    return separate_gate_up(gate_up_proj.T)


def _gate_up_proj(fc1_weight: torch.Tensor) -> torch.Tensor:
    return interleave_gate_up(fc1_weight).T


def _transpose(part: torch.Tensor) -> torch.Tensor:
    return part.T


def _same(part: torch.Tensor) -> torch.Tensor:
    return part


def _alone(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Parts]:
    return lambda tensor: (function(tensor),)
