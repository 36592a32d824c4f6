"""The sum of mixed values that a base's digest is, wherever the values come from."""

import torch
from torch import Tensor

PIECE = 1 << 22
"""Values that are hashed at a time; bounds the memory that it takes."""
SPLITMIX_STEPS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))
"""(shift, factor) of SplitMix64's finalizer, whose factors are 0xBF58476D1CE4E5B9 and
0x94D049BB133111EB, as int64."""


def digest_of_values(weight: Tensor, layer: int) -> Tensor:
    """Sum up the mixed values of one weight, int64 [].

    ``layer``: that it belongs to, from 1 on; 0 outside layers.
    """
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    for piece in weight.flatten().split(PIECE):
        words = piece.float().view(torch.int32).long()
        words += layer << 32
        for shift, factor in SPLITMIX_STEPS:
            words ^= words >> shift
            words *= factor
        words ^= words >> 31
        total += words.sum()
    return total


def as_digits(total: Tensor) -> str:
    """Write the sum over all values of a base, int64 [], as 16 hexadecimal digits."""
    return f"{int(total) % (1 << 64):016x}"
