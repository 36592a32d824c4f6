"""MXFP4 expert matrices: message format, Hugging Face's stored names, and digests.

Names and layout of blocks and scales are those of ``hf_layouts.mxfp4_shapes``:
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
"""Bytes of a block's values, without its scale, which takes 1 more byte."""

QUANTIZED_AT_ONCE_BYTES = 1 << 28
"""Maximum size of the bf16 matrices that are stacked and quantized in one launch."""

Digests = dict[str, str]
"""Digest of an expert's blocks and scales, 16 hexadecimal digits, by ``matrix_name``."""


# -- messages ----------------------------------------------------------------------------------


def append_scales(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Append each block's scale: [..., n, 16] and [..., n] give [..., n, 17], all uint8."""
    # One tensor instead of two, so that a matrix is one message.
    return torch.cat([blocks, scales[..., None]], dim=-1)


def separate_scales(joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert ``append_scales``: uint8 [..., n, 17] gives blocks [..., n, 16], scales [..., n]."""
    return joined[..., :BLOCK_BYTES], joined[..., BLOCK_BYTES]


def shape_with_scales(shape: Shape) -> Shape:
    """Return the shape that ``append_scales`` gives for a matrix [..., in]."""
    return (*shape[:-1], shape[-1] // BLOCK, BLOCK_BYTES + 1)


def mxfp4_part_shapes(shape: Shape) -> list[Shape]:
    """Return the shapes of the blocks and the scales of a matrix [out, in]."""
    return [(*shape[:-1], shape[-1] // BLOCK, BLOCK_BYTES), (*shape[:-1], shape[-1] // BLOCK)]


def mxfp4_parts(
    mapping: ParameterMapping, blocks: torch.Tensor, scales: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Convert blocks and scales of a Megatron parameter to Hugging Face's names and row order.

    Args:
        mapping: entry of one expert's matrix.
        blocks: uint8 [out, in / 32, 16], in the parameter's row order.
        scales: uint8 [out, in / 32], in the same row order.

    Returns:
        Blocks and scales by stored name.
    """
    order = row_order(mapping, blocks.device)
    blocks_name, scales_name = stored_names(mapping.hf_names[0])
    return {blocks_name: blocks[order], scales_name: scales[order]}


def row_order(mapping: ParameterMapping, device: torch.device) -> torch.Tensor:
    """Return the row of a Megatron parameter for each output of its Hugging Face tensor.

    Args:
        mapping: entry of one expert's matrix, bias or adapter factor, with one Hugging Face tensor.
        device: device of the result.

    Returns:
        int64 [out].
    """
    # Blocks run along the inputs, and the table reorders only outputs, so blocks move whole.
    rows = torch.arange(mapping.shape[0], device=device)
    if len(mapping.shape) == 1:
        [order] = mapping.to_hf(rows)
        return order
    # Send row numbers through the table's own transform, so that both cannot disagree.
    [order] = mapping.to_hf(rows[:, None])
    # The transform of an expert's matrix also transposes: [out, 1] becomes [1, out].
    return order.flatten()


def matrices_at_once(shape: Shape) -> int:
    """Return how many matrices of a shape are quantized in one launch."""
    # 2 bytes per bf16 value.
    return max(1, QUANTIZED_AT_ONCE_BYTES // (2 * math.prod(shape)))


def stacked_in_bf16(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack matrices of one shape in bf16, [matrices, out, in], for ``mxfp4.quantize``."""
    return torch.stack(list(weights)).to(torch.bfloat16)


def pack_stack(
    mapping: ParameterMapping, weights: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Quantize one matrix of several experts to Hugging Face's names and row order.

    The result equals ``mxfp4.quantize`` of each matrix. One launch quantizes up to ``QUANTIZED_AT_ONCE_BYTES``.

    Args:
        mapping: entry of the first expert's matrix.
        weights: [out, in] of each expert, of any float dtype.

    Returns:
        Blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32], by stored name.
    """
    place: Any = {"dtype": torch.uint8, "device": weights[0].device}
    blocks_shape, scales_shape = mxfp4_part_shapes(mapping.shape)

    # Allocate the whole stack once. Concatenating pieces would need its memory twice.
    blocks = torch.empty(len(weights), *blocks_shape, **place)
    scales = torch.empty(len(weights), *scales_shape, **place)

    order = row_order(mapping, weights[0].device)
    at_once = matrices_at_once(mapping.shape)
    for first in range(0, len(weights), at_once):
        some = stacked_in_bf16(weights[first : first + at_once])
        some_blocks, some_scales = mxfp4.quantize(some)
        some_place = slice(first, first + len(some))
        # index_select writes to its place without a temporary copy.
        torch.index_select(some_blocks, 1, order, out=blocks[some_place])
        torch.index_select(some_scales, 1, order, out=scales[some_place])

    blocks_name, scales_name = stored_names(mapping.hf_names[0])
    return {blocks_name: blocks, scales_name: scales}


# -- all weights by name -----------------------------------------------------------------------


def stored_names(name: str) -> tuple[str, str]:
    """Return the stored names of the blocks and the scales of a Hugging Face tensor."""
    # Only the names are used, so the shape is arbitrary.
    blocks_name, scales_name = mxfp4_shapes(name, (1, BLOCK, 1))
    return blocks_name, scales_name


def quantize_experts(named_tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantize the expert matrices [experts, in, out] among weights by Hugging Face name.

    Returns:
        uint8 blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32] by stored name,
        and all other tensors.
    """
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors.items():
        if is_expert_matrix(name):
            # Hugging Face stores experts input-major, but blocks run along the inputs.
            blocks, scales = mxfp4.quantize(tensor.mT.contiguous().to(torch.bfloat16))
            packed |= zip(stored_names(name), (blocks, scales), strict=True)
        else:
            packed[name] = tensor
    return packed


def fake_quantize_experts(named_tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Round the expert matrices [experts, in, out] among weights by name to MXFP4 values."""
    return {name: rounded_to_mxfp4(name, tensor) for name, tensor in named_tensors.items()}


def rounded_to_mxfp4(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Round expert matrices [experts, in, out] to MXFP4 values; return other tensors unmodified.

    Args:
        name: Hugging Face name.
        tensor: its values.
    """
    if not is_expert_matrix(name):
        return tensor

    # Hugging Face stores experts input-major, but blocks run along the inputs.
    packed = mxfp4.quantize(tensor.mT.contiguous().bfloat16())
    return mxfp4.dequantize(*packed).mT.to(tensor.dtype)


# -- digests -----------------------------------------------------------------------------------


def matrix_name(name: str, expert: int) -> str:
    """Return the key in ``Digests`` of one expert's matrix.

    Args:
        name: Hugging Face name of the tensor that stacks the experts.
        expert: index of the expert.
    """
    return f"{name}, expert {expert}"


def matrix_digest(blocks: torch.Tensor, scales: torch.Tensor) -> str:
    """Return the digest, 16 hexadecimal digits, of one expert's matrix.

    Args:
        blocks: uint8 [out, in / 32, 16].
        scales: uint8 [out, in / 32].
    """
    return digest_of_bits(blocks, scales)


def stack_digests(named_tensors: Iterable[NamedTensor]) -> Digests:
    """Return the digests of all expert matrices among weights by stored name.

    The matrices are uint8 blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32].
    """
    tensors = dict(named_tensors)
    digests = {}
    for blocks_name, stack in tensors.items():
        # Visit each matrix once, by its blocks.
        if not blocks_name.endswith("_blocks"):
            continue
        name = blocks_name.removesuffix("_blocks")
        _, scales_name = stored_names(name)
        for expert, (blocks, scales) in enumerate(zip(stack, tensors[scales_name], strict=True)):
            digests[matrix_name(name, expert)] = matrix_digest(blocks, scales)
    return digests


def first_difference(expected: Digests, actual: Digests) -> str | None:
    """Return the first matrix that differs or that only one side has; None if all are equal."""
    # Sorted, so that all ranks name the same matrix.
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            return name
    return None


def directory_digests(directory: HfDirectory) -> Digests:
    """Return the digests of all expert matrices that a directory holds in MXFP4."""
    digests = {}
    for name in directory.names():
        if not is_expert_matrix(name):
            continue
        # One expert at a time, to bound memory.
        for expert in range(directory.config.num_experts):
            packed = directory.read_mxfp4(name, expert)
            if packed is not None:
                digests[matrix_name(name, expert)] = matrix_digest(*packed)
    return digests
