"""Random numbers that depend on a seed and a tensor's name, not on the parallel layout."""

import hashlib

import torch


def named_generator(seed: int, name: str) -> torch.Generator:
    """Return the generator of the initial values of tensor ``name`` in a run with ``seed``."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    # manual_seed takes 63 bits.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
