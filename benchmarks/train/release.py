"""Releases the memory of a trainer before the next case."""

from __future__ import annotations

import gc
from typing import Any

import torch

from megatron_gptoss.layers.scratch_memory import release_scratch_memory
from megatron_gptoss.trainer import PolicyTrainer


def release(trainer: PolicyTrainer) -> None:
    """Release the trainer's GPU memory, even if references to its tensors remain."""
    gc.unfreeze()
    tensors: list[Any] = list(trainer.module.parameters()) + list(trainer.module.buffers())
    for chunk in trainer.model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            tensors += [buffer.grad_data, buffer.param_data]
    # On CPUs without the distributed optimizer, Megatron's optimizer is not chained.
    for part in getattr(trainer.optimizer, "chained_optimizers", []):
        for state in part.optimizer.state.values():
            tensors += state.values()

    release_scratch_memory()
    if not torch.cuda.is_available():
        return
    # Megatron and Transformer Engine keep references, but storages of size 0 hold no memory.
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.untyped_storage().resize_(0)
    gc.collect()
    torch.cuda.empty_cache()
