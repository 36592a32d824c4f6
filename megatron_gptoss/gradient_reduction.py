"""Gradients of a step: reduction over ranks, copies between passes, and values that are not finite.

They are reduced in the last pass of a step, or at the step.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor


def finalize_gradients(
    model: list[Any],
    num_tokens: Tensor | None = None,
    **kwargs: Any,
) -> None:
    """Sum gradients over ranks without dividing by Megatron's number of tokens."""
    # Loss functions normalize over the global batch.
    finalize_model_grads(model, None, **kwargs)


@contextmanager
def without_reduction(model: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Let Megatron's schedules leave gradients unreduced in the block.

    Each rank then keeps the sum of its own micro-batches. A second reduction would add the sums of
    other ranks again.
    """
    config = model[0].config
    finalize, no_sync = config.finalize_model_grads_func, config.no_sync_func
    config.finalize_model_grads_func = None
    # A schedule leaves ``no_sync_func`` before its last micro-batch, which starts reductions.
    config.no_sync_func = None
    try:
        with ExitStack() as stack:
            for chunk in model:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        config.finalize_model_grads_func = finalize
        config.no_sync_func = no_sync


def reduce_gradients(model: Sequence[DistributedDataParallel]) -> None:
    """Sum gradients over ranks after passes in ``without_reduction``. Collective."""
    for chunk in model:
        # ``finalize_model_grads`` only waits for reductions that overlap with the backward pass.
        if chunk.ddp_config.overlap_grad_reduce:
            chunk.start_grad_sync()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    finalize_gradients(list(model), pg_collection=groups)


@dataclass(frozen=True)
class UnfinishedStep:
    """State between the passes of a step, in host memory."""

    passes: int
    """Passes since the last step."""
    failure: str | None
    """Message of the first failed pass since the last step. None if all passes succeeded."""
    gradients: Sequence[Tensor]
    """Unreduced gradients of this rank. Empty without passes."""


def copy_gradients(model: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """Copy the gradients of this rank to host memory."""
    return [buffer.to("cpu", copy=True) for buffer in _gradient_buffers(model)]


def load_gradients(model: Sequence[DistributedDataParallel], gradients: Sequence[Tensor]) -> None:
    """Replace the gradients of this rank by a result of ``copy_gradients``."""
    for buffer, gradient in zip(_gradient_buffers(model), gradients, strict=True):
        buffer.copy_(gradient)


def _gradient_buffers(model: Sequence[DistributedDataParallel]) -> Iterator[Tensor]:
    for chunk in model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            yield buffer.grad_data


def describe_non_finite_gradients(chunks: Sequence[Any]) -> str:
    """Return a message with the affected parameters of all ranks, by layer. Collective."""
    local_names = []
    for i, chunk in enumerate(chunks):
        names = [
            f"{name} (rank {dist.get_rank()}, chunk {i})"
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad and not parameter.main_grad.isfinite().all()
        ]
        local_names.append(names)

    # In layer order: chunk 0 of every rank comes before chunk 1 of any rank.
    gathered: list[list[list[str]]] = [local_names] * dist.get_world_size()
    dist.all_gather_object(gathered, local_names)
    names = []
    for chunk_of_ranks in zip(*gathered, strict=True):
        for rank_names in chunk_of_ranks:
            names += rank_names

    if len(names) == 1:
        return f"the gradient of {names[0]} is not finite. Other gradients are finite"
    return (
        f"the gradients of {len(names)} parameters are not finite. The first is {names[0]}, the last "
        f"is {names[-1]}. Begin with the last one, because NaN spreads from there to earlier layers"
    )
