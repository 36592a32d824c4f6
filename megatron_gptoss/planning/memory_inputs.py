"""What a prediction of memory needs to know.

Imports no torch, so that configurations can build it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from megatron_gptoss.config import (
    AdapterConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Quantization,
)


@dataclass(frozen=True)
class EngineMemory:
    """What rollout engines hold of each trainer GPU that they share. The context and libraries of
    a server's process are included."""

    awake_fraction: float = 0.0
    """Share of the whole GPU while they generate: weights, key/value cache, graphs, everything."""
    asleep_bytes: int = 0
    """Bytes while the trainer works."""
    weight_bytes: int = 0
    """Bytes of the weights, which are all that a server holds in a weight sync besides what it
    keeps asleep."""
    sync_bytes: int = 0
    """Bytes that servers take in a weight sync besides their weights."""
    working_bytes: int = 0
    """Part of the awake share that servers take only when they are first asked for something:
    graphs' inputs and activations."""
    bucket_bytes: int = 0
    """Weights that a sync has under way at a time, if no tensor is larger; the trainer holds the
    bucket that is sent and the next one."""
    copies_buckets: bool = False
    """Whether servers copy what they are sent, as those of several GPUs do."""
    packs_experts: bool = False
    """Whether a sync sends experts in MXFP4."""


@dataclass(frozen=True)
class MemoryInputs:
    """The models, the layout and the batch of a training run."""

    model: ModelConfig
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    """The policy's."""
    tokens: int
    """Of one micro-batch, before context parallelism shares them out."""
    auxiliary_models: Sequence[OptimizerConfig | None] = ()
    """Further models in the policy's layout, with its adapters if it has any, of which one at a
    time computes: a critic's optimizer, None for a reference policy, which has none."""
    adapter: AdapterConfig | None = None
    """What is trained of all models; None for all parameters."""
    frozen: tuple[str, ...] = ()
    """Parts of layers that are not trained, as in ``ablation.freeze``. Predictions count them as
    trained; a layout must leave every pipeline stage something else to train."""
    quantization: Quantization | None = None
    """What the policy's experts are trained through; None for their weights as they are."""
    engine: EngineMemory | None = None
    """Of servers that share the trainer's GPUs."""
    micro_batches: float = math.inf
    """The most that a data-parallel rank has in a step: a pipeline holds no more of them."""
    longest_sequence: int = 1
    """Tokens; a micro-batch must be able to hold it."""
    sequences: float = math.inf
    """Of a training step."""
    mini_batches: int = 1
    """Optimizer steps that share the sequences; in each, every data-parallel rank needs at
    least one."""

    def with_sequences(self, sequences: float) -> Self:
        """Copy with so many sequences, all as long as possible, and the micro-batches they
        fill."""
        if math.isinf(sequences):
            return replace(self, sequences=sequences, micro_batches=math.inf)

        rows = math.ceil(sequences / (self.tokens // self.longest_sequence))
        multiple = self.parallel.micro_batch_multiple
        micro_batches = math.ceil(rows / (self.parallel.data * multiple)) * multiple
        return replace(self, sequences=sequences, micro_batches=micro_batches)
