"""Reduction of gradients over data-parallel ranks: in the last pass of a step, or at the step."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

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
