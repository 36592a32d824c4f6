"""Expert matrices in MXFP4 on their way from a trainer: joined for messages, by Hugging Face's stored
names, and told apart by digests.

Hugging Face's names and layout of blocks and scales are those of ``hf_layouts.mxfp4_shapes``:
[E, out, in / 32, 16] and [E, out, in / 32].
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from converters.hf_directory import HfDirectory
from converters.hf_layouts import BLOCK, Shape, is_expert_matrix, mxfp4_shapes
from converters.mapping import NamedTensor, ParameterMapping
from gptoss_kernels import mxfp4
from megatron_gptoss.tensor_hash import digest_of_bits

BLOCK_BYTES = BLOCK // 2
"""Of the values of a block; its scale is one byte more."""

PIECE_BYTES = 1 << 28
"""Of bf16 matrices that are brought side by side to be quantized at once."""

Digests = dict[str, str]
"""By ``matrix_name``: 16 hexadecimal digits of an expert's blocks and scales."""


# -- messages ----------------------------------------------------------------------------------


def join(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Put every block's scale behind it: uint8 [..., n, 17] of [..., n, 16] and [..., n]."""
    return torch.cat([blocks, scales[..., None]], dim=-1)


def split(joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert ``join``."""
    return joined[..., :BLOCK_BYTES], joined[..., BLOCK_BYTES]


def joined_shape(shape: Shape) -> Shape:
    """Return the shape of ``join`` of a matrix [..., in]."""
    return (*shape[:-1], shape[-1] // BLOCK, BLOCK_BYTES + 1)


def packed_shapes(shape: Shape) -> list[Shape]:
    """Return the shapes of the blocks and the scales of a matrix [out, in]."""
    return [(*shape[:-1], shape[-1] // BLOCK, BLOCK_BYTES), (*shape[:-1], shape[-1] // BLOCK)]


def packed_parts(
    mapping: ParameterMapping, blocks: torch.Tensor, scales: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Bring the blocks and scales of a Megatron parameter to Hugging Face's names and order.

    Args:
        mapping: of one expert's matrix.
        blocks: [out, in / 32, 16], in the parameter's order of rows.
        scales: [out, in / 32], likewise.
    """
    order = row_order(mapping, blocks.device)
    blocks_name, scales_name = stored_names(mapping.hf_names[0])
    return {blocks_name: blocks[order], scales_name: scales[order]}


def row_order(mapping: ParameterMapping, device: torch.device) -> torch.Tensor:
    """Return which row of a Megatron parameter is each output of its Hugging Face tensor, int64 [out].

    Args:
        mapping: of a matrix or bias of one expert, with one Hugging Face tensor.
        device: of the result.
    """
    # Blocks lie along the inputs, and the table only moves outputs: it moves whole blocks.
    rows = torch.arange(mapping.shape[0], device=device)
    if len(mapping.shape) == 1:
        [order] = mapping.to_hf(rows)
        return order
    [order] = mapping.to_hf(rows[:, None])
    return order[0]


def matrices_at_once(shape: Shape) -> int:
    """Return how many matrices of one shape are quantized at once."""
    return max(1, PIECE_BYTES // (2 * math.prod(shape)))


def stacked_in_bf16(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return matrices of one shape side by side, as ``mxfp4.quantize`` takes them."""
    return torch.stack(list(weights)).to(torch.bfloat16)


def pack_stack(
    mapping: ParameterMapping, weights: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Quantize one matrix of several experts, by Hugging Face's names and in its order.

    The bits are those of ``mxfp4.quantize`` of each. As many as fit into ``PIECE_BYTES`` are one
    launch.

    Args:
        mapping: of the first expert's.
        weights: [out, in] of each expert, of any float dtype.
    """
    place: Any = {"dtype": torch.uint8, "device": weights[0].device}
    blocks_shape, scales_shape = packed_shapes(mapping.shape)
    blocks = torch.empty(len(weights), *blocks_shape, **place)
    scales = torch.empty(len(weights), *scales_shape, **place)

    order = row_order(mapping, weights[0].device)
    at_once = matrices_at_once(mapping.shape)
    for first in range(0, len(weights), at_once):
        some = stacked_in_bf16(weights[first : first + at_once])
        some_blocks, some_scales = mxfp4.quantize(some)
        some_place = slice(first, first + len(some))
        torch.index_select(some_blocks, 1, order, out=blocks[some_place])
        torch.index_select(some_scales, 1, order, out=scales[some_place])

    blocks_name, scales_name = stored_names(mapping.hf_names[0])
    return {blocks_name: blocks, scales_name: scales}


# -- all weights by name -----------------------------------------------------------------------


def stored_names(name: str) -> tuple[str, str]:
    """Return the names of the blocks and the scales of Hugging Face's tensor ``name``."""
    blocks_name, scales_name = mxfp4_shapes(name, (1, BLOCK, 1))
    return blocks_name, scales_name


def pack_experts(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantize the experts' matrices among weights by Hugging Face name; others stay as they are."""
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        if is_expert_matrix(name):
            blocks, scales = mxfp4.quantize(tensor.mT.contiguous().to(torch.bfloat16))
            packed |= zip(stored_names(name), (blocks, scales), strict=True)
        else:
            packed[name] = tensor
    return packed


def fake_quantize_experts(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Round the experts' matrices among weights by Hugging Face name to MXFP4's values."""
    return {name: rounded_to_mxfp4(name, tensor) for name, tensor in named.items()}


def rounded_to_mxfp4(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Round a tensor of Hugging Face name ``name``: matrices of experts, [experts, in, out], to
    values of MXFP4, others not at all."""
    if not is_expert_matrix(name):
        return tensor

    # Hugging Face has experts input-major; blocks lie along the inputs.
    packed = mxfp4.quantize(tensor.mT.contiguous().bfloat16())
    return mxfp4.dequantize(*packed).mT.to(tensor.dtype)


# -- digests -----------------------------------------------------------------------------------


def matrix_name(name: str, expert: int) -> str:
    """Name one expert's matrix of Hugging Face's tensor ``name``."""
    return f"{name}, expert {expert}"


def matrix_digest(blocks: torch.Tensor, scales: torch.Tensor) -> str:
    """Compute 16 hexadecimal digits of one expert's blocks [out, in / 32, 16] and scales."""
    return digest_of_bits(blocks, scales)


def stack_digests(named: Iterable[NamedTensor]) -> Digests:
    """Compute the digests of all experts' matrices among weights by stored name."""
    tensors = dict(named)
    digests = {}
    for blocks_name, stack in tensors.items():
        if not blocks_name.endswith("_blocks"):
            continue
        name = blocks_name.removesuffix("_blocks")
        _, scales_name = stored_names(name)
        for expert, (blocks, scales) in enumerate(zip(stack, tensors[scales_name], strict=True)):
            digests[matrix_name(name, expert)] = matrix_digest(blocks, scales)
    return digests


def first_difference(expected: Digests, found: Digests) -> str | None:
    """Name the first matrix that only one side has, or that differs; None if all are equal."""
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            return name
    return None


def directory_digests(directory: HfDirectory) -> Digests:
    """Compute the digests of all experts' matrices that a directory holds in MXFP4."""
    digests = {}
    for name in directory.names():
        if not is_expert_matrix(name):
            continue
        for expert in range(directory.config.num_experts):
            packed = directory.read_mxfp4(name, expert)
            if packed is not None:
                digests[matrix_name(name, expert)] = matrix_digest(*packed)
    return digests
