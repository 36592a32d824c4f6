"""Random numbers that depend on a seed and the name of a tensor, not on the parallel layout."""

import hashlib

import torch


def named_generator(seed: int, name: str) -> torch.Generator:
    """Return a generator for the initial values of a tensor.

    Args:
        seed: seed of the run.
        name: name of the tensor in the whole model.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    # 63 bits, so that the seed also fits a signed 64-bit integer.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
