"""One entry of a name table: which Megatron parameter holds which Hugging Face tensors, and how.

Pure data and pure functions, no process groups and no files. Tables are in ``families``.

Megatron keeps one matrix for queries, keys and values: per key/value group its query heads, then its
key head, then its value head. Split evenly along dim 0 it gives every tensor-parallel rank complete
groups, as long as the ranks divide the groups.
"""

import math
from collections.abc import Callable, Iterator
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
    tensor_parallel_blocks: int = 1
    """Blocks along ``tensor_parallel_dim``, equally large, of each of which every rank has its share:
    2 where gates lie above ups."""

    @property
    def checkpoint_index(self) -> Shape:
        """Place in the leading axes of the torch_dist tensor: (), (layer,) or (layer, expert)."""
        return tuple(i for i in (self.layer, self.expert) if i is not None)

    @property
    def is_unchanged(self) -> bool:
        """Whether the parameter equals one complete Hugging Face tensor."""
        return self.expert is None and self.to_megatron is same

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
        """Return what tensor-parallel ``rank`` of ``ranks`` holds of ``full``: a view, or of several
        blocks a copy."""
        if self.tensor_parallel_dim is None:
            return full
        dim = self.tensor_parallel_dim
        if self.tensor_parallel_blocks == 1:
            return full.chunk(ranks, dim)[rank]
        blocks = full.chunk(self.tensor_parallel_blocks, dim)
        return torch.cat([block.chunk(ranks, dim)[rank] for block in blocks], dim)

    def unshard(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """Join the shards of all tensor-parallel ranks, in order, to the full parameter."""
        if self.tensor_parallel_dim is None or len(shards) == 1:
            return shards[0]

        dim = self.tensor_parallel_dim
        if self.tensor_parallel_blocks == 1:
            return torch.cat(shards, dim)
        blocks_of_ranks = [shard.chunk(self.tensor_parallel_blocks, dim) for shard in shards]
        blocks = [torch.cat(block, dim) for block in zip(*blocks_of_ranks, strict=True)]
        return torch.cat(blocks, dim)


NamedParts = tuple[ParameterMapping, dict[str, torch.Tensor]]

# -- entries that families share ---------------------------------------------------------------


def unchanged(
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
        to_megatron=same,
        to_hf=single_part(same),
    )


def unchanged_in_layer(
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
        to_megatron=same,
        to_hf=single_part(same),
    )


def qkv_mapping(config: ModelConfig, layer: int, kind: str) -> ParameterMapping:
    """Map the ``kind`` (weight or bias) of the projections to queries, keys and values."""
    query_rows = config.query_size
    key_rows = config.key_size
    tail = (config.hidden_size,) if kind == "weight" else ()
    groups = config.num_key_value_heads
    return ParameterMapping(
        name=f"decoder.layers.{layer}.self_attention.linear_qkv.{kind}",
        shape=(query_rows + 2 * key_rows, *tail),
        hf_names=tuple(f"model.layers.{layer}.self_attn.{x}_proj.{kind}" for x in "qkv"),
        part_shapes=((query_rows, *tail), (key_rows, *tail), (key_rows, *tail)),
        tensor_parallel_dim=0,
        layer=layer,
        expert=None,
        checkpoint_key=f"decoder.layers.self_attention.linear_qkv.{kind}",
        to_megatron=partial(merge_qkv, groups=groups),
        to_hf=partial(split_qkv, groups=groups, head_size=config.head_size),
    )


def embedding_mapping(config: ModelConfig) -> ParameterMapping:
    """Map the embedding."""
    return unchanged(
        "embedding.word_embeddings.weight",
        "model.embed_tokens.weight",
        (config.vocab_size, config.hidden_size),
        tensor_parallel_dim=0,
    )


def output_mappings(config: ModelConfig) -> Iterator[ParameterMapping]:
    """Map what follows the layers: the last norm, and an output layer that is not the embedding."""
    hidden = config.hidden_size
    yield unchanged("decoder.final_layernorm.weight", "model.norm.weight", (hidden,))
    if not config.tied_embeddings:
        shape = (config.vocab_size, hidden)
        yield unchanged("output_layer.weight", "lm_head.weight", shape, tensor_parallel_dim=0)


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


def same(part: torch.Tensor) -> torch.Tensor:
    return part


def single_part(
    transform: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], Parts]:
    """Turn a transform of a parameter that has one part into a ``to_hf``."""
    return lambda tensor: (transform(tensor),)
