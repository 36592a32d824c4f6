"""Sizes of what is computed a block at a time, which the plan of a run's memory counts.

Nothing is imported here, so that a plan is made without torch."""

CHUNK_TOKENS = 8192
CHUNK_COLUMNS = 12_800
"""Of a block of logits: large enough that adding to the gradients of hidden states and weights costs
little beside the products, small enough for 0.4 GB in fp32."""

PART_ELEMENTS = 1 << 28
"""Parameters whose offloaded state is on the GPU at a time, or one parameter if it has more. Their
bf16 moments and 16 bits of the master weight are 1.6 GB: long enough copies for the bus, and short
of what activations need."""
