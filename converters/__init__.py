"""Conversion of weights between Hugging Face and Megatron, without a GPU or a built model."""

import os

import megatron_gptoss  # noqa: F401 (before Megatron: without a GPU it then needs no compiler)

# Without huge pages for large CPU tensors, a conversion spends half of its time in page faults.
# torch reads this variable at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__all__ = ["torch_dist", "verify"]
