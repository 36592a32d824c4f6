"""Block sizes of computations, used by the trainer and by memory predictions.

This module imports nothing, so that ``gptoss plan`` does not load torch.
"""

# A block of fp32 logits takes 0.4 GB. Larger blocks would need more memory. In smaller ones,
# accumulating the gradients of hidden states and weights would cost more next to the products.
CHUNK_TOKENS = 8192
"""Rows in a block of logits."""
CHUNK_COLUMNS = 12_800
"""Columns in a block of logits."""

PARTS_OF_STAGE = 4
"""Micro-batches per pipeline stage whose most likely tokens are on the GPU at the same time."""

# bf16 moments and the lower halves of master weights take 1.6 GB. That is large enough for
# efficient copies over PCIe and smaller than the activations, whose memory it reuses.
PART_ELEMENTS = 1 << 28
"""Parameters whose offloaded state is on the GPU at the same time. One parameter may exceed it."""
