"""Entries of a name table: the mapping of a Megatron parameter to Hugging Face tensors.

The module has only data and pure functions, no process groups and no files. Tables are in
``families``.

Megatron keeps one matrix for queries, keys and values: per key/value group its query heads, its key
head, then its value head. An even split along dim 0 gives every tensor-parallel rank complete
groups if the number of ranks divides the number of groups.
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
    """One Megatron parameter and the Hugging Face tensors (or slices of them) that form it."""

    name: str
    """Global Megatron name, such as ``decoder.layers.3.self_attention.linear_qkv.weight``."""
    shape: Shape
    """Full shape over all tensor-parallel ranks."""
    hf_names: tuple[str, ...]
    """Names of the Hugging Face tensors that form it."""
    part_shapes: tuple[Shape, ...]
    """Shape of each part: a Hugging Face tensor, or one expert's slice of it."""
    tensor_parallel_dim: int | None
    """Dimension that tensor-parallel ranks split evenly; None if each rank holds all of it.

    Experts are never split.
    """
    layer: int | None
    """0-based layer; None outside the layers."""
    expert: int | None
    """Index of the slice along dim 0 of the Hugging Face tensors; None for the whole tensors."""
    checkpoint_key: str
    """Key in torch_dist checkpoints. Its tensor stacks the parameter over layers (and experts)."""
    to_megatron: Callable[..., torch.Tensor]
    """Function of the parts that returns the Megatron tensor [shape]."""
    to_hf: Callable[[torch.Tensor], Parts]
    """Function of the Megatron tensor that returns its parts."""
    tensor_parallel_blocks: int = 1
    """Number of equal blocks along ``tensor_parallel_dim``. Every rank has a share of each block.

    2 for gates above ups.
    """

    @property
    def checkpoint_index(self) -> Shape:
        """Index in the leading dimensions of the checkpoint: (), (layer,) or (layer, expert)."""
        return tuple(i for i in (self.layer, self.expert) if i is not None)

    @property
    def is_unchanged(self) -> bool:
        """True if the parameter equals one complete Hugging Face tensor."""
        # An expert's parameter is a slice of its tensor, so it never equals the whole.
        return self.expert is None and self.to_megatron is identity

    @property
    def bf16_bytes(self) -> int:
        """Size in bf16, the unit of progress reports."""
        return 2 * math.prod(self.shape)

    def named_parts(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split the Megatron tensor [shape] into parts [part_shapes], by Hugging Face name."""
        return dict(zip(self.hf_names, self.to_hf(tensor), strict=True))

    def local_shape(self, ranks: int) -> Shape:
        """Return the shape on one of ``ranks`` tensor-parallel ranks."""
        if self.tensor_parallel_dim is None:
            return self.shape

        local = list(self.shape)
        # Megatron requires that the ranks divide the dimension.
        local[self.tensor_parallel_dim] //= ranks
        return tuple(local)

    def shard(self, full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """Return the shard of one tensor-parallel rank.

        Args:
            full: full parameter, with ``shape``.
            rank: tensor-parallel rank.
            ranks: tensor-parallel size.

        Returns:
            Shard [local_shape(ranks)]: a view of ``full``, or a copy if there are several blocks.
        """
        if self.tensor_parallel_dim is None:
            return full
        dim = self.tensor_parallel_dim
        if self.tensor_parallel_blocks == 1:
            return full.chunk(ranks, dim)[rank]
        # A plain split would give the first ranks only gates, the last ranks only ups.
        blocks = full.chunk(self.tensor_parallel_blocks, dim)
        return torch.cat([block.chunk(ranks, dim)[rank] for block in blocks], dim)

    def unshard(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """Join the shards [local_shape(ranks)] of all ranks, in order, to the parameter [shape]."""
        # Ranks without a split hold equal copies, of which one is passed.
        if self.tensor_parallel_dim is None or len(shards) == 1:
            return shards[0]

        dim = self.tensor_parallel_dim
        if self.tensor_parallel_blocks == 1:
            return torch.cat(shards, dim)
        # Transpose the order [rank][block] to [block][rank] before joining.
        blocks_of_ranks = [shard.chunk(self.tensor_parallel_blocks, dim) for shard in shards]
        blocks = [torch.cat(block, dim) for block in zip(*blocks_of_ranks, strict=True)]
        return torch.cat(blocks, dim)


NamedParts = tuple[ParameterMapping, dict[str, torch.Tensor]]

# -- entries that families share ---------------------------------------------------------------


def unchanged(
    name: str, hf_name: str, shape: Shape, tensor_parallel_dim: int | None = None
) -> ParameterMapping:
    """Map a parameter outside the layers that equals one Hugging Face tensor.

    Args:
        name: global Megatron name.
        hf_name: Hugging Face name.
        shape: full shape.
        tensor_parallel_dim: dimension that tensor-parallel ranks split; None if they do not.
    """
    return ParameterMapping(
        name=name,
        shape=shape,
        hf_names=(hf_name,),
        part_shapes=(shape,),
        tensor_parallel_dim=tensor_parallel_dim,
        layer=None,
        expert=None,
        checkpoint_key=name,
        to_megatron=identity,
        to_hf=single_part(identity),
    )


def unchanged_in_layer(
    layer: int, name: str, hf_name: str, shape: Shape, tensor_parallel_dim: int | None = None
) -> ParameterMapping:
    """Map a layer's parameter that equals one Hugging Face tensor.

    Args:
        layer: 0-based layer.
        name: Megatron name without the prefix of the layer.
        hf_name: Hugging Face name without the prefix of the layer.
        shape: full shape.
        tensor_parallel_dim: dimension that tensor-parallel ranks split; None if they do not.
    """
    return ParameterMapping(
        name=f"decoder.layers.{layer}.{name}",
        shape=shape,
        hf_names=(f"model.layers.{layer}.{hf_name}",),
        part_shapes=(shape,),
        tensor_parallel_dim=tensor_parallel_dim,
        layer=layer,
        expert=None,
        checkpoint_key=f"decoder.layers.{name}",
        to_megatron=identity,
        to_hf=single_part(identity),
    )


def qkv_mapping(config: ModelConfig, layer: int, kind: str) -> ParameterMapping:
    """Map the projection of a layer to queries, keys and values.

    Args:
        config: model configuration.
        layer: 0-based layer.
        kind: ``weight`` or ``bias``.
    """
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
        # Weights and biases differ only in their trailing dimension, which both functions keep.
        to_megatron=partial(merge_qkv, groups=groups),
        to_hf=partial(split_qkv, groups=groups, head_size=config.head_size),
    )


def embedding_mapping(config: ModelConfig) -> ParameterMapping:
    """Map the embedding [vocab_size, hidden_size]."""
    return unchanged(
        "embedding.word_embeddings.weight",
        "model.embed_tokens.weight",
        (config.vocab_size, config.hidden_size),
        tensor_parallel_dim=0,
    )


def output_mappings(config: ModelConfig) -> Iterator[ParameterMapping]:
    """Map the final norm, and the output layer unless it is tied to the embedding."""
    hidden = config.hidden_size
    yield unchanged("decoder.final_layernorm.weight", "model.norm.weight", (hidden,))
    # A tied output layer is the embedding, which is listed once.
    if not config.tied_embeddings:
        shape = (config.vocab_size, hidden)
        yield unchanged("output_layer.weight", "lm_head.weight", shape, tensor_parallel_dim=0)


# -- transforms --------------------------------------------------------------------------------


def merge_qkv(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, groups: int
) -> torch.Tensor:
    """Merge the three projections into Megatron's QKV, group by group.

    Args:
        query: [heads * head_size, ...].
        key: [groups * head_size, ...].
        value: [groups * head_size, ...].
        groups: key/value heads.

    Returns:
        [(heads + 2 * groups) * head_size, ...].
    """
    tail = query.shape[1:]
    # Per group: query heads, key head, value head. [groups, rows, ...]
    per_group = [x.reshape(groups, -1, *tail) for x in (query, key, value)]
    return torch.cat(per_group, dim=1).reshape(-1, *tail)


def split_qkv(qkv: torch.Tensor, *, groups: int, head_size: int) -> Parts:
    """Invert ``merge_qkv``.

    Args:
        qkv: [(heads + 2 * groups) * head_size, ...] of any dtype.
        groups: key/value heads.
        head_size: rows of a head.

    Returns:
        Query [heads * head_size, ...], key and value [groups * head_size, ...].
    """
    tail = qkv.shape[1:]
    per_group = qkv.reshape(groups, -1, *tail)
    # A group ends with one key head and one value head.
    query_rows = per_group.shape[1] - 2 * head_size
    parts = per_group.split([query_rows, head_size, head_size], dim=1)
    return tuple(part.reshape(-1, *tail) for part in parts)


def identity(part: torch.Tensor) -> torch.Tensor:
    """Return the tensor [...] itself."""
    return part


def single_part(
    transform: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], Parts]:
    """Turn a transform of a tensor [...] into a ``to_hf`` function of a single part."""
    return lambda tensor: (transform(tensor),)
