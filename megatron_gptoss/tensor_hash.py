"""Hashes of tensors, equal on CPUs and GPUs: of their bits, or of their values in any layout.

Both mix 64-bit words with SplitMix64's finalizer and add the results modulo 2**64. They find
accidental differences and are no signatures. Files on a disk have XXH3 checksums
(``checkpoint.checksums``), which a CPU computes 100 times faster and a GPU cannot.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 1 << 20
"""Words that are hashed at a time; bounds the memory that it takes."""
WORD_BYTES = 8
GOLDEN_RATIO = -0x61C8864680B583EB
"""Odd step of SplitMix64, 0x9E3779B97F4A7C15 as int64."""
SPLITMIX_STEPS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1))
"""(shift, factor) of SplitMix64's finalizer, whose factors are 0xBF58476D1CE4E5B9 and
0x94D049BB133111EB, as int64. The last has no product."""


def mix(words: Tensor) -> Tensor:
    """Mix the bits of each word, int64, in place, and return ``words``."""
    for shift, factor in SPLITMIX_STEPS:
        # >> on a signed integer repeats the sign; the mask clears those bits.
        words ^= (words >> shift) & ((1 << (64 - shift)) - 1)
        if factor != 1:
            words *= factor
    return words


def digest_of_bits(*tensors: Tensor) -> str:
    """Compute 16 hexadecimal digits of the bytes of tensors, in C order, one tensor after the other.

    The order of bytes counts. Shapes, dtypes, devices and strides do not.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    first = 0
    for tensor in tensors:
        words = _words(tensor)
        for piece in words.split(PIECE):
            last = first + piece.numel()
            # Words that change places are noticed, because every place adds another number.
            places = torch.arange(first, last, device=piece.device)
            total += mix(places.mul_(GOLDEN_RATIO).add_(piece)).sum().to(total.device)
            first = last
    # Zeros behind a tensor, which padding adds, too, make another digest.
    return as_digits(mix(total ^ sum(tensor.nbytes for tensor in tensors)))


def digest_of_values(weight: Tensor, layer: int) -> Tensor:
    """Sum up the mixed values of one weight, int64 [].

    The sum is the same in every order and number format: ranks may share the values in any way, and
    sums of weights can be added.

    Args:
        weight: float values, of any dtype that fp32 contains.
        layer: the layer that the weight belongs to, from 1 on; 0 outside layers.
    """
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    for piece in weight.flatten().split(PIECE):
        words = piece.float().view(torch.int32).long()
        words += layer << 32
        total += mix(words).sum()
    return total


def as_digits(total: Tensor) -> str:
    """Write a sum or a hash, int64 [], as 16 hexadecimal digits."""
    return f"{int(total) % (1 << 64):016x}"


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as int64 [words], the last one padded with zeros."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    padding = -content.numel() % WORD_BYTES
    if padding:
        content = F.pad(content, (0, padding))
    elif content.storage_offset() % WORD_BYTES:
        content = content.clone()  # a view of words begins at a whole word
    return content.view(torch.int64)
