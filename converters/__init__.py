"""Hugging Face <-> Megatron weights, without a GPU and without building the model."""

import os

# torch then takes large CPU tensors in huge pages: a conversion spends half of its time in page faults otherwise. Read
# by torch at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
