"""The 64-bit hash of a tensor that SGLang's ``/weights_checker`` reports.

SGLang 0.5.17 computes it in ``tensor_hash`` of ``srt/managers/mm_utils.py``. On a CPU it is the
first 8 bytes of SHA-256. On a GPU a Triton kernel computes it (``gpu_tensor_hash`` and
``hash_tiles32_kernel_blocked`` in ``kernels/ops/memory/gpu_tensor_hash.py``). This module computes
equal hashes with torch operations on any device, also for a tensor in several parts. The names in
capitals below are constants of that kernel, and all arithmetic is modulo 2**32.
``megatron_gptoss.tensor_hash`` is for hashes that need not equal SGLang's.

The kernel reads a tensor as 32-bit words. It XORs the word at index i with a number that depends on
i and mixes the result. The sum of a tile's words is XORed with the tensor's size and mixed again.
Two such sums, with different constants, are the halves of a 64-bit word per tile. These words are
summed modulo 2**64, and the sum is mixed.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_gptoss.tensor_hash import mix_bits

PIECE_BYTES = 1 << 24
"""Bytes that are hashed at a time, or one expert if it is larger. Bounds the memory use."""
TILE = 8192
"""Words that one program of the kernel sums (``tile_words``)."""


@dataclass(frozen=True)
class _Half:
    """Constants for one half of a tile's 64-bit word.

    Word i is XORed with (i * factor + seed) ^ rotl(i).
    """

    factor: int
    """POS_C1 or POS_C2 of the kernel."""
    seed: int
    rotation: int
    """Number of bits by which the index is rotated to the left."""
    shift: int
    """Position of this half in the 64-bit word, in bits."""


SEED = 0x243F6A88
HALVES = (
    _Half(factor=0x27D4EB2D, seed=SEED, rotation=15, shift=32),
    _Half(factor=0x165667B1, seed=SEED * 0x9E3779B1 ^ 0xDEADBEEF, rotation=13, shift=0),
)
MURMUR_STEPS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
"""(shift, factor) of MurmurHash3's 32-bit finalizer (``_fmix32``). The last step only shifts."""


def cpu_hash(parts: list[torch.Tensor]) -> int:
    """Hash ``parts``, joined along dim 0, as SGLang does on a CPU.

    Args:
        parts: [rows, ...] each, of one dtype and with equal shapes behind dim 0.
    """
    digest = hashlib.sha256()
    for piece in _byte_pieces(parts):
        digest.update(piece.cpu().numpy())
    return int.from_bytes(digest.digest()[:8], "big")


def gpu_hash(parts: list[torch.Tensor]) -> int:
    """Hash ``parts``, joined along dim 0, as SGLang does on a GPU.

    Args:
        parts: [rows, ...] each, on any device, of one dtype and with equal shapes behind dim 0.
    """
    total_bytes = sum(part.nbytes for part in parts)
    size = -(-total_bytes // 4) * 4  # padded to whole words

    first = 0
    total = torch.zeros((), dtype=torch.int64, device=parts[0].device)
    for tiles in _tiles(parts):
        # torch has no uint32 arithmetic. int32 arithmetic wraps around to the same bits.
        index = torch.arange(
            first,
            first + tiles.numel(),
            dtype=torch.int32,
            device=tiles.device,
        ).view_as(tiles)
        first += tiles.numel()

        # [tiles, TILE] throughout; the sum over a tile's words is [tiles].
        for half in HALVES:
            words = index * half.factor
            words += _as_int32(half.seed)
            # Rotation by shifts. The right shift copies the sign bit, which is 0: an index reaches
            # 2^31 only with tensors of 8 GB.
            words ^= (index << half.rotation) | (index >> (32 - half.rotation))
            words ^= tiles

            sums = _murmur_mix(words).sum(1, dtype=torch.int32)
            mixed = _murmur_mix(sums ^ _as_int32(size)).long() & 0xFFFFFFFF
            total += (mixed << half.shift).sum()

    # ``_final_splitmix64``
    return int(mix_bits(total)) % (1 << 64)


def _byte_pieces(parts: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the bytes of all parts in order, uint8 [bytes], whole rows at a time."""
    for part in parts:
        rows = max(1, PIECE_BYTES * len(part) // part.nbytes)
        # ``contiguous`` copies a transposed view, so it gets one piece at a time.
        for piece in part.split(rows):
            yield piece.contiguous().view(-1).view(torch.uint8)


def _tiles(parts: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the words of all parts, int32 [tiles, TILE].

    The last tile may be incomplete, [1, rest], padded with zeros to whole words. Parts and pieces
    do not end at the end of a tile, so the remaining bytes of one are put before the next.
    """
    tile_bytes = 4 * TILE
    rest = torch.empty(0, dtype=torch.uint8, device=parts[0].device)
    for piece in _byte_pieces(parts):
        rest = torch.cat([rest, piece])
        full = rest.numel() // tile_bytes * tile_bytes
        yield rest[:full].view(torch.int32).view(-1, TILE)
        rest = rest[full:]

    if rest.numel():
        padding = rest.new_zeros(-rest.numel() % 4)
        yield torch.cat([rest, padding]).view(torch.int32)[None]


def _murmur_mix(words: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each word, int32, in place."""
    for shift, factor in MURMUR_STEPS:
        # >> on a signed integer copies the sign bit. The mask removes the copies.
        words ^= (words >> shift) & ((1 << (32 - shift)) - 1)
        words *= _as_int32(factor)
    return words


def _as_int32(value: int) -> int:
    """Return the signed integer with the lowest 32 bits of ``value``."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
