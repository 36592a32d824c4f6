"""Gathering the policy's weights on trainer ranks, which send them to engines."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from converters.errors import GatheringBroken, GatheringRefused
from converters.gathering import GatheredWeights, WeightGathering
from converters.mapping import NamedTensor
from rl_loop.weight_sync.source import SyncFailed, WeightSender


def send_gathered(
    gathering: WeightGathering, sender: WeightSender, dtype: torch.dtype
) -> Exception | None:
    """Gather all weights on the ranks of ``sender``, and let it send them from each. Collective.

    A rank that fails takes part in the messages that the others wait for, so that another try can
    begin on all ranks.

    Args:
        gathering: of the policy.
        sender: carries weights to engines.
        dtype: dtype of the tensors for ``sender``. MXFP4 blocks and scales stay bytes.

    Returns:
        The error of this rank, None if it succeeded. The caller raises it after it has released
        memory for the engines.

    Raises:
        SyncFailed: on every rank, if one has no memory for its part.
        GatheringBroken: if the ranks can exchange no more messages.
    """
    try:
        weights = gathering.begin(
            sender.ranks,
            transposed=sender.transposed,
            packed=sender.packed,
            # Several receivers keep step by the broadcasts that bring them what they send on.
            paced=len(sender.ranks) == 1,
        )
    except GatheringRefused as refusal:
        raise SyncFailed(str(refusal)) from refusal

    failure: Exception | None = None
    try:
        if dist.get_rank() in sender.ranks:
            sender.send(_in_dtype(weights, dtype), dist.get_rank())
    except GatheringBroken:
        raise
    except Exception as error:
        failure = error
    weights.finish()
    if failure is None and weights.failure is not None:
        failure = SyncFailed(f"rank {dist.get_rank()} has no weights: {weights.failure}")

    # The traceback of a failure holds this function's variables.
    del weights
    return failure


def _in_dtype(weights: GatheredWeights, dtype: torch.dtype) -> Iterator[NamedTensor]:
    for name, tensor in weights:
        # Blocks and scales of MXFP4 are bytes.
        yield name, tensor if tensor.dtype == torch.uint8 else tensor.to(dtype)
        del tensor  # or it would outlive its bucket
