"""Memory layouts of MXFP4 matrices for Hopper's tensor cores, written and read in place.

They are ``HopperMXValueLayout(mx_axis=1)`` and ``HopperMXScaleLayout(mx_axis=1, num_warps=4)`` of
triton_kernels 3.6 with two differences (``gptoss_expert_values``):

- The order of bits in a word of values needs fewer instructions to decode.
- Scales are stored as exponents of bf16 numbers.

SGLang creates triton_kernels' layouts, with 8 warps, of whole layers, in about 12 passes over
memory that need several times the size of the layer. The functions below write a matrix into
existing memory once per byte. They write every byte of that memory, including padding.
``gptoss_mxfp4_experts`` compares both layouts when a server starts.

A matrix has ``rows`` outputs. A row has ``row_bytes`` bytes of two codes along the inputs.

Values: both sizes are padded with zeros to multiples of 64. The storage has a quarter of the rows,
each four times as long, in 32-bit words of 4 x 2 codes, whose bits are permuted (``_spread``). Word
(R, C) of the storage contains the codes of the bytes

    A[m, k], A[m + 8, k], A[m, k + 4], A[m + 8, k + 4]
    m = 16 (R / 4) + 2 (R % 4) + (C / 16) % 2
    k = 32 (C / 32) + 8 (C % 4) + (C / 4) % 4

Scales: rows are padded with zeros to multiples of 256, columns to even numbers. Scale (m, k) is
byte C of storage row R:

    m = 128 a + 64 b + 16 w + 8 c + d
    k = 2 e + f
    R = 4 a + w
    C = (((2 e + b) 8 + d) 2 + f) 2 + c

The stored byte is the scale byte plus ``SCALE_BIAS``, modulo 256. The padding of triton_kernels is
to multiples of 128. With 256, a program that multiplies 256 rows at a time does not read outside
the storage.
"""

# Triton interprets parameter annotations, so its kernels have none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

VALUE_ALIGNMENT = 64
"""Rows, and bytes per row, are padded to multiples of this number."""
SCALE_WARPS = 4
"""Warps of a program for which scales are laid out.

Programs with more warps can read them with ``scales_of_program`` (``gptoss_moe_occupancy``).
"""
SCALE_ROWS = 256
"""Rows of scales are padded to multiples of this number, the maximum rows of a program."""
SCALE_BIAS = 126
"""Difference between stored and original scale bytes.

A scale byte e means 2^(e - 127), and the factor of a value is 2^(e - 1). The stored byte is the
exponent of that bf16 factor.
"""
NEUTRAL_SCALE = 127
"""2 ** 0, the scale with which SGLang pads matrices."""
ROTATIONS = (0, 4, 10)
"""Rotations to the right, in bits, of the first three bytes of a word."""
WORDS = 1024
"""Words per program of the kernels."""


def value_storage_shape(rows: int, row_bytes: int) -> tuple[int, int]:
    """Return rows and bytes per row of the storage for a matrix's values."""
    return _round_up(rows, VALUE_ALIGNMENT) // 4, _round_up(row_bytes, VALUE_ALIGNMENT) * 4


def scale_storage_shape(rows: int, blocks: int) -> tuple[int, int]:
    """Return rows and bytes per row of the storage for a matrix's scales."""
    return _round_up(rows, SCALE_ROWS) // 32, _round_up(blocks, 2) * 32


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# -- values ---------------------------------------------------------------------------------------


def swizzle_values(packed: Tensor, storage: Tensor) -> None:
    """Write matrices into their storage.

    Args:
        packed: uint8 [experts, rows, row_bytes], any strides, but bytes of a row must be adjacent.
        storage: uint8 [experts, *value_storage_shape], contiguous. All bytes are written. It may be
            the storage of larger matrices, to which ``packed`` is padded with zeros.
    """
    if storage.is_cuda:
        _launch(_swizzle_kernel, packed, storage, packed)
        return

    experts, rows, row_bytes = packed.shape
    padded = packed.new_zeros(experts, storage.shape[1] * 4, storage.shape[2] // 4)
    padded[:, :rows, :row_bytes] = packed

    # The formulas of the module's docstring, as digits of the row m and the byte k:
    #     m = 16 m2 + 8 upper + 2 pair + odd        (right, upper) is the byte within a word
    #     k = 32 k2 + 8 octet + 4 right + byte
    # -> [experts, m2, upper, pair, odd, k2, octet, right, byte]
    bytes_of = padded.view(experts, -1, 2, 4, 2, padded.shape[2] // 32, 4, 2, 4)
    # -> [experts, (m2, pair), (k2, odd, byte, octet), (right, upper)]: rows, words, bytes of a word
    bytes_of = bytes_of.permute(0, 1, 3, 5, 4, 8, 6, 7, 2).reshape(*storage.shape[:2], -1, 4)

    word = bytes_of.new_zeros(bytes_of.shape[:-1], dtype=torch.int64)
    for place in range(4):
        word |= _spread(bytes_of[..., place].long(), place)
    storage.view(torch.int32).copy_(_as_int32(word))


def unswizzle_values(storage: Tensor, rows: int, row_bytes: int) -> tuple[Tensor, int]:
    """Read matrices back.

    Args:
        storage: uint8 [experts, *value_storage_shape].
        rows: rows of the matrices.
        row_bytes: bytes per row.

    Returns:
        uint8 [experts, rows, row_bytes], and the number of padding bytes that are not zero.
    """
    experts = len(storage)
    packed = storage.new_empty(experts, rows, row_bytes)
    if storage.is_cuda:
        wrong = torch.zeros((), dtype=torch.int32, device=storage.device)
        _launch(_unswizzle_kernel, packed, storage, wrong)
        return packed, int(wrong)

    # int64, because shifts of int32 would copy the sign bit.
    word = storage.view(torch.int32).long() & 0xFFFFFFFF
    bytes_of = torch.stack([_gather(word, place) for place in range(4)], -1).to(torch.uint8)

    # The digits of swizzle_values, from the storage's order back to the matrix's: [experts, m2,
    # pair, k2, odd, byte, octet, right, upper] -> rows (m2, upper, pair, odd), bytes (k2, octet,
    # right, byte)
    row_words = storage.shape[2] // 4
    bytes_of = bytes_of.view(experts, storage.shape[1] // 4, 4, row_words // 32, 2, 4, 4, 2, 2)
    padded = bytes_of.permute(0, 1, 8, 2, 4, 3, 6, 7, 5).reshape(experts, -1, row_words)
    packed.copy_(padded[:, :rows, :row_bytes])

    # swizzle_values writes zeros outside the matrix, so other bytes there are wrong.
    wrong_bytes = int(padded.count_nonzero()) - int(packed.count_nonzero())
    return packed, wrong_bytes


# A byte of a word holds two codes, each a sign and three bits. In the two halves of a 32-bit number
# the codes occupy the bits of bf16's sign, lowest two exponent bits and highest mantissa bit: 15,
# 8, 7 and 6. The numbers of the first three bytes are rotated right by 0, 4 and 10 bits, so that a
# rotation and a mask decode two bf16 numbers. This leaves bits 10, 9, 1 and 0 of each half for the
# fourth byte: its bit 8 moves 2 bits to the left, its other bits 6 to the right.


def _spread(byte: Tensor, place: int) -> Tensor:
    """Return the bits of a byte at their positions in the word, int64.

    Args:
        byte: int64 byte values.
        place: index of the byte in the word, 0 to 3.
    """
    number = ((byte & 8) << 12) | ((byte & 7) << 6) | ((byte & 0x80) << 24) | ((byte & 0x70) << 18)
    if place == 3:
        return ((number & 0x80C080C0) >> 6) | ((number & 0x01000100) << 2)
    return _rotated(number, 32 - ROTATIONS[place])


def _gather(word: Tensor, place: int) -> Tensor:
    """Invert ``_spread``: return byte number ``place`` of a word."""
    if place == 3:
        return _extract_byte(((word << 6) & 0x80C080C0) | ((word >> 2) & 0x01000100))
    return _extract_byte(_rotated(word, ROTATIONS[place]))


def _extract_byte(number: Tensor) -> Tensor:
    """Return the byte whose codes are at the bf16 positions of a number. Other bits are ignored."""
    low = ((number >> 12) & 8) | ((number >> 6) & 7)
    return low | ((number >> 24) & 0x80) | ((number >> 18) & 0x70)


def _rotated(word: Tensor, bits: int) -> Tensor:
    """Rotate the lowest 32 of 64 bits to the left."""
    return ((word << bits) | (word >> (32 - bits))) & 0xFFFFFFFF


def _as_int32(word: Tensor) -> Tensor:
    """Return signed numbers with the same 32 bits."""
    return (word - ((word >> 31) << 32)).to(torch.int32)


def to_plugin_bit_order(storage: Tensor) -> Tensor:
    """Convert values in triton_kernels' layout to the bit order of this module.

    Args:
        storage: uint8 [..., bytes of a row], contiguous.
    """
    word = storage.view(torch.int32).long() & 0xFFFFFFFF
    # There the numbers are 0, 3 and 6 bits lower, and the fourth number fills the remaining bits.
    fourth = ((word << 1) & 0x80008000) | ((word >> 3) & 0x01800180) | ((word >> 7) & 0x00400040)
    numbers = (word, word << 3, word << 6, fourth)
    ours = torch.zeros_like(word)
    for place, number in enumerate(numbers):
        ours |= _spread(_extract_byte(number), place)
    return _as_int32(ours).view(torch.uint8)


def _launch(kernel, packed: Tensor, storage: Tensor, result: Tensor) -> None:
    """Run a kernel over all words of ``storage``.

    Args:
        kernel: ``_swizzle_kernel`` or ``_unswizzle_kernel``.
        packed: uint8 [experts, rows, row_bytes].
        storage: uint8 [experts, *value_storage_shape], contiguous.
        result: counter of wrong bytes of padding for ``_unswizzle_kernel``. The other kernel
            ignores it.

    Raises:
        ValueError: if the strides are not supported.
    """
    experts, rows, row_bytes = packed.shape
    if packed.stride(2) != 1 or not storage.is_contiguous():
        raise ValueError(
            f"packed has strides {packed.stride()} and storage {storage.stride()}, but bytes of "
            "a row must be adjacent"
        )

    words = storage.view(torch.int32)
    _, storage_rows, row_words = words.shape
    words_per_expert = storage_rows * row_words
    expert_stride, row_stride, _ = packed.stride()

    grid = (triton.cdiv(words_per_expert, WORDS), experts)
    kernel[grid](
        packed,
        words,
        result,
        rows,
        row_bytes,
        expert_stride,
        row_stride,
        row_words,
        words_per_expert,
        WORDS,
    )


@triton.jit
def _place_in_matrix(word, row_words):
    """Return the matrix row and byte of the first byte of a storage word."""
    storage_row = word // row_words
    column = word % row_words
    row = (storage_row // 4) * 16 + (storage_row % 4) * 2 + (column // 16) % 2
    byte = (column // 32) * 32 + (column % 4) * 8 + (column // 4) % 4
    return row, byte


@triton.jit
def _swizzle_kernel(
    packed,
    storage,
    unused,
    rows,
    row_bytes,
    expert_stride,
    row_stride,
    row_words,
    count,
    WORDS: tl.constexpr,
):
    # Grid: words of a matrix, experts. A program gathers the four bytes of each of its words.
    expert = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = word < count
    row, byte = _place_in_matrix(word, row_words)

    result = tl.zeros((WORDS,), dtype=tl.uint32)
    for place in tl.static_range(4):
        its_row = row + 8 * (place % 2)
        its_byte = byte + 4 * (place // 2)
        source = packed + expert * expert_stride + its_row.to(tl.int64) * row_stride + its_byte
        is_data = inside & (its_row < rows) & (its_byte < row_bytes)
        x = tl.load(source, mask=is_data, other=0).to(tl.uint32)
        number = ((x & 8) << 12) | ((x & 7) << 6) | ((x & 0x80) << 24) | ((x & 0x70) << 18)
        if place == 0:
            result |= number
        elif place == 3:
            result |= ((number & 0x80C080C0) >> 6) | ((number & 0x01000100) << 2)
        else:
            bits = 4 if place == 1 else 10
            result |= (number >> bits) | (number << (32 - bits))

    target = storage + expert * count + word
    tl.store(target, result.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def _unswizzle_kernel(
    packed,
    storage,
    wrong,
    rows,
    row_bytes,
    expert_stride,
    row_stride,
    row_words,
    count,
    WORDS: tl.constexpr,
):
    # The inverse of _swizzle_kernel. Padding is not returned, but its nonzero bytes are counted.
    expert = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = word < count
    row, byte = _place_in_matrix(word, row_words)
    word_bits = tl.load(storage + expert * count + word, mask=inside, other=0)
    word_bits = word_bits.to(tl.uint32, bitcast=True)

    wrong_bytes = tl.zeros((WORDS,), dtype=tl.int32)
    for place in tl.static_range(4):
        its_row = row + 8 * (place % 2)
        its_byte = byte + 4 * (place // 2)
        number = word_bits
        if place == 3:
            number = ((word_bits << 6) & 0x80C080C0) | ((word_bits >> 2) & 0x01000100)
        elif place > 0:
            bits = 4 if place == 1 else 10
            number = (word_bits << bits) | (word_bits >> (32 - bits))
        x = ((number >> 12) & 8) | ((number >> 6) & 7)
        x |= ((number >> 24) & 0x80) | ((number >> 18) & 0x70)
        is_data = inside & (its_row < rows) & (its_byte < row_bytes)
        target = packed + expert * expert_stride + its_row.to(tl.int64) * row_stride + its_byte
        tl.store(target, x.to(tl.uint8), mask=is_data)
        wrong_bytes += ((x != 0) & inside & (is_data == 0)).to(tl.int32)

    # One addition per program, and usually none, because the padding should be zero.
    found = tl.sum(wrong_bytes, 0)
    tl.atomic_add(wrong, found, mask=found > 0)


# -- scales ---------------------------------------------------------------------------------------


def swizzle_scales(scales: Tensor, padded_shape: tuple[int, int], storage: Tensor) -> None:
    """Write scales into their storage.

    Args:
        scales: uint8 [experts, rows, blocks].
        padded_shape: rows and blocks to which SGLang pads the matrix, with ``NEUTRAL_SCALE``.
        storage: uint8 [experts, *scale_storage_shape(*padded_shape)], contiguous. All bytes are
            written.
    """
    experts, rows, blocks = scales.shape
    padded_rows, padded_blocks = padded_shape
    padded = scales.new_zeros(experts, storage.shape[1] * 32, storage.shape[2] // 32)
    padded[:, :padded_rows, :padded_blocks] = NEUTRAL_SCALE
    padded[:, :rows, :blocks] = scales

    # [experts, a, b, w, c, d, e, f] -> [experts, a, w, e, b, d, f, c]
    source = padded.view(experts, -1, 2, SCALE_WARPS, 2, 8, padded.shape[2] // 2, 2)
    source = source.permute(0, 1, 3, 6, 2, 5, 7, 4)
    torch.add(source, SCALE_BIAS, out=storage.view(source.shape))  # modulo 256


def unswizzle_scales(
    storage: Tensor, rows: int, blocks: int, padded_shape: tuple[int, int]
) -> tuple[Tensor, int]:
    """Read scales back.

    Args:
        storage: uint8 [experts, *scale_storage_shape(*padded_shape)].
        rows: rows of the matrices.
        blocks: blocks per row.
        padded_shape: rows and blocks to which SGLang pads the matrix.

    Returns:
        uint8 [experts, rows, blocks], and the number of padding bytes that differ from those that
        ``swizzle_scales`` writes.
    """
    experts = len(storage)
    pairs = storage.shape[2] // 64
    parts = storage.view(experts, -1, SCALE_WARPS, pairs, 2, 8, 2, 2)
    padded = parts.permute(0, 1, 4, 2, 7, 5, 3, 6).reshape(experts, storage.shape[1] * 32, -1)
    scales = padded[:, :rows, :blocks] - SCALE_BIAS  # modulo 256

    expected = torch.empty_like(storage)
    swizzle_scales(scales, padded_shape, expected)
    return scales, int((expected != storage).sum())
