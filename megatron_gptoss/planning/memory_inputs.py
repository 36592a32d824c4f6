"""Inputs of memory predictions.

This module does not import torch, so that code that reads configurations can use it.
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
    """Memory of rollout engines on each trainer GPU that they share.

    All values include the CUDA context and libraries of the server process.
    """

    running_fraction: float = 0.0
    """Fraction of the GPU while the engines generate: weights, KV cache, graphs, everything."""
    paused_bytes: int = 0
    """Bytes while the trainer works."""
    weight_bytes: int = 0
    """Bytes of the weights, which a weight sync needs in addition to ``paused_bytes``."""
    sync_bytes: int = 0
    """Further bytes that servers need during a weight sync."""
    working_bytes: int = 0
    """Part of the running memory that servers allocate at the first request.

    It consists of CUDA graph inputs and activations.
    """
    bucket_bytes: int = 0
    """Bytes of weights in flight in a weight sync, if no tensor is larger.

    The trainer holds the bucket that is sent, and the next bucket.
    """
    copies_buckets: bool = False
    """True if servers copy received weights. Servers with several GPUs do."""
    has_mxfp4_experts: bool = False
    """True if a weight sync sends experts in MXFP4."""


@dataclass(frozen=True)
class MemoryInputs:
    """Models, layout and batch of a training run."""

    model: ModelConfig
    """Architecture of all models except teachers."""
    parallel: ParallelConfig
    """Parallel layout of all models."""
    optimizer: OptimizerConfig
    """Optimizer of the policy."""
    tokens: int
    """Tokens per micro-batch, before context parallelism splits them."""
    auxiliary_models: Sequence[OptimizerConfig | None] = ()
    """Further models, with the layout and the adapters of the policy.

    Each entry is the optimizer of a critic, or None for a reference policy. Only one model computes
    at a time.
    """
    teachers: Sequence[ModelConfig] = ()
    """Architectures of frozen teachers with the layout of the policy.

    Only one model computes at a time.
    """
    teacher_top_k: int = 0
    """Tokens at every place of which a teacher gives the log-probs."""
    adapter: AdapterConfig | None = None
    """Adapters that all models train; None if all parameters are trained."""
    frozen: tuple[str, ...] = ()
    """Parts of layers that are not trained, as in ``ablation.freeze``.

    Predictions count them as trained. Each pipeline stage must have other parameters to train.
    """
    quantization: Quantization | None = None
    """Format of the policy's experts, or with an adapter of their frozen base; None for bf16."""
    engine: EngineMemory | None = None
    """Memory of servers on the trainer's GPUs; None if there are none."""
    micro_batches: float = math.inf
    """Maximum micro-batches of a data-parallel rank per step, which bounds those in flight."""
    longest_sequence: int = 1
    """Length of the longest sequence in tokens. A micro-batch must be able to hold it."""
    sequences: float = math.inf
    """Sequences per training step."""
    mini_batches: int = 1
    """Optimizer steps per training step. Each needs a sequence for every data-parallel rank."""

    @property
    def has_mxfp4_base(self) -> bool:
        """True if the frozen experts below adapters are held in MXFP4."""
        return self.quantization is not None and self.adapter is not None

    # A layout with another data-parallel size has other micro-batches per rank.
    def with_sequences(self, sequences: float) -> Self:
        """Return a copy with a different number of sequences and the resulting micro-batches.

        All sequences are assumed to have the maximum length.
        """
        if math.isinf(sequences):
            return replace(self, sequences=sequences, micro_batches=math.inf)

        # A pipeline needs a multiple of micro-batches on each rank, so round up.
        rows = math.ceil(sequences / (self.tokens // self.longest_sequence))
        multiple = self.parallel.micro_batch_multiple
        micro_batches = math.ceil(rows / (self.parallel.data * multiple)) * multiple
        return replace(self, sequences=sequences, micro_batches=micro_batches)
