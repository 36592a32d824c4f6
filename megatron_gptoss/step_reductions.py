"""Reduction of loss outputs over micro-batches and ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.scorer import gather_context_parallel
from megatron_gptoss.step_results import LossOutput


def gather_token_values(
    outputs: Sequence[LossOutput], batches: Sequence[PackedBatch]
) -> dict[str, list[Tensor]]:
    """Join the token values of losses over context-parallel ranks. Collective among these.

    Returns:
        [tokens] of every micro-batch by name. Empty on stages before the last.
    """
    if not outputs:
        return {}
    values = {}
    for name in outputs[0].token_values:
        shards = [output.token_values[name] for output in outputs]
        values[name] = gather_context_parallel(shards, batches)
    return values


def reduce_scalars(
    values: Sequence[dict[str, Tensor]],
    operation: dist.ReduceOp.RedOpType,
) -> dict[str, float]:
    """Reduce named scalars over micro-batches, data- and context-parallel ranks. Collective.

    Args:
        values: scalars [] of any dtype of every micro-batch, with the same names in all. Empty on
            pipeline stages before the last.
        operation: SUM or MAX.

    Returns:
        Reduced values by name.

    Raises:
        ValueError: a name is missing in some micro-batches.
    """
    if not values:
        return {}
    names = sorted(values[0])
    for scalars in values:
        differing = sorted(set(names) ^ set(scalars))
        if differing:
            raise ValueError(
                f"loss metrics {', '.join(differing)} are missing in some micro-batches. Return all "
                "names for every micro-batch, with 0 if there is nothing to sum"
            )
    if not names:
        return {}

    # One message for all names. In fp64, because sums cover up to millions of tokens. Sorted,
    # because ranks reduce by position.
    rows = [torch.stack([scalars[name].detach().double() for name in names]) for scalars in values]
    stacked = torch.stack(rows)
    combine = torch.sum if operation == dist.ReduceOp.SUM else torch.amax
    reduced = combine(stacked, dim=0)

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(reduced, op=operation, group=group)
    return dict(zip(names, reduced.tolist(), strict=True))
