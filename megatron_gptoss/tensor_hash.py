"""Hashes of tensors, equal on CPUs and GPUs: of their bits, or of their values in any layout.

Both hash 64-bit words with the finalizer of SplitMix64 and sum the results modulo 2**64. They
detect accidental differences and are not signatures. Files have XXH3 checksums instead
(``checkpoint.checksums``), which a CPU computes 100x faster. A GPU cannot compute XXH3.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 1 << 20
"""Words that are hashed at a time, which bounds the memory."""
WORD_BYTES = 8
"""Bytes per word."""
GOLDEN_RATIO = -0x61C8864680B583EB
"""Odd increment of SplitMix64, 0x9E3779B97F4A7C15 as int64."""
SPLITMIX_STEPS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1))
"""(shift, factor) of each step of SplitMix64's finalizer.

The factors are 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as int64. The last step has none.
"""


def mix_bits(words: Tensor) -> Tensor:
    """Hash each word of an int64 tensor [...] in place, and return the tensor."""
    for shift, factor in SPLITMIX_STEPS:
        # >> of a signed integer repeats the sign bit. The mask clears the repeated bits.
        words ^= (words >> shift) & ((1 << (64 - shift)) - 1)
        if factor != 1:
            words *= factor
    return words


def digest_of_bits(*tensors: Tensor) -> str:
    """Return 16 hexadecimal digits that identify the bytes of tensors [...], in C order.

    The digits depend on the order of the bytes. They do not depend on shapes, dtypes, devices and
    strides.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    first = 0
    for tensor in tensors:
        words = _words(tensor)
        for piece in words.split(PIECE):
            last = first + piece.numel()
            # Add a different number at each position, so that swapped words are detected.
            places = torch.arange(first, last, device=piece.device)
            total += mix_bits(places.mul_(GOLDEN_RATIO).add_(piece)).sum().to(total.device)
            first = last
    # Include the size. Otherwise zeros at the end of a tensor would equal its padding.
    return as_digits(mix_bits(total ^ sum(tensor.nbytes for tensor in tensors)))


def digest_of_values(weight: Tensor, layer: int) -> Tensor:
    """Return the sum of the hashes of all values in a weight.

    The sum does not depend on the order and number format of the values. Ranks can hold any parts
    of a weight, and the sums of several weights can be added.

    Args:
        weight: [...] values of a dtype that fp32 contains.
        layer: number of the weight's layer, from 1; 0 outside of layers.

    Returns:
        [] int64.
    """
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    for piece in weight.flatten().split(PIECE):
        words = piece.float().view(torch.int32).long()
        words += layer << 32
        total += mix_bits(words).sum()
    return total


def as_digits(total: Tensor) -> str:
    """Return a sum or hash, int64 [], as 16 hexadecimal digits."""
    return f"{int(total) % (1 << 64):016x}"


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor [...] as int64 [words]. The last word is padded with zeros."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    padding = -content.numel() % WORD_BYTES
    if padding:
        content = F.pad(content, (0, padding))
    elif content.storage_offset() % WORD_BYTES:
        # A view as int64 must start at a multiple of 8 bytes.
        content = content.clone()
    return content.view(torch.int64)
