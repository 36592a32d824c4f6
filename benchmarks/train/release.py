"""Releases the memory of a trainer or a model before the next case."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch

from megatron_gptoss.layers.scratch_memory import release_scratch_memory


def release(trainer: Any) -> None:
    """Release a trainer's GPU memory, even if references to its tensors remain.

    Args:
        trainer: has a ``module``, a ``model`` (data-parallel wrappers of its parts) and an
            ``optimizer``.
    """
    gc.unfreeze()
    tensors: list[Any] = []
    for chunk in trainer.model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            tensors += [buffer.grad_data, buffer.param_data]
    # On CPUs without the distributed optimizer, Megatron's optimizer is not chained.
    for part in getattr(trainer.optimizer, "chained_optimizers", []):
        for group in part.optimizer.param_groups:
            tensors += group["params"]
        for state in part.optimizer.state.values():
            tensors += state.values()
    release_module(trainer.module, tensors)


def release_module(module: torch.nn.Module, further: Iterable[Any] = ()) -> None:
    """Release the GPU memory of a module's tensors and of ``further`` ones."""
    tensors = [*module.parameters(), *module.buffers(), *further]
    release_scratch_memory()
    if not torch.cuda.is_available():
        return
    # Megatron and Transformer Engine keep references, but storages of size 0 hold no memory.
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.untyped_storage().resize_(0)
    gc.collect()
    torch.cuda.empty_cache()
