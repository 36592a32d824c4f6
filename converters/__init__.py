"""Hugging Face <-> Megatron weights, without a GPU and without building the model."""

import os

import megatron_gptoss  # noqa: F401 (before Megatron, which needs no compiler without a GPU)

# A conversion spends half of its time in page faults unless torch takes large CPU tensors in
# huge pages. torch reads this variable at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
