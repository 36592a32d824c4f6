"""Gathering of the policy's weights on the trainer ranks that send them to engines."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from converters.errors import GatheringAbortedError, GatheringError
from converters.gathering import GatheredWeights, WeightGathering
from converters.mapping import NamedTensor
from rl_loop.weight_sync.source import SyncError, WeightSender


def send_gathered(
    gathering: WeightGathering, sender: WeightSender, dtype: torch.dtype
) -> Exception | None:
    """Gather all weights on the ranks of ``sender``, which sends them. Collective.

    A rank that fails still exchanges the messages that the others wait for, so that all ranks can
    begin another attempt.

    Args:
        gathering: gathering of the policy's weights.
        sender: sender to the engines.
        dtype: dtype of the tensors for ``sender``. MXFP4 blocks and scales stay bytes.

    Returns:
        The error of this rank, None if it succeeded. The caller raises it after it has released
        memory for the engines.

    Raises:
        SyncError: on every rank, if a rank cannot allocate memory for the weights of others.
        GatheringError: if the ranks can no longer communicate.
    """
    try:
        weights = gathering.begin(
            sender.ranks,
            transposed=sender.transposed,
            mxfp4_experts=sender.mxfp4_experts,
            adapters_only=sender.adapters_only,
            # With several receivers, the broadcasts of the tensors already synchronize the ranks.
            paced=len(sender.ranks) == 1,
        )
    # No rank has sent anything yet, so a further attempt may succeed with more free memory.
    except GatheringAbortedError as error:
        raise SyncError(str(error)) from error

    failure: Exception | None = None
    try:
        if dist.get_rank() in sender.ranks:
            sender.send(_in_dtype(weights, dtype), dist.get_rank())
    except GatheringError:
        # The ranks can no longer communicate, so the messages below would never arrive.
        raise
    except Exception as error:
        failure = error

    # Also after a failure, because the other ranks wait for this rank's messages.
    weights.finish()
    if failure is None and weights.failure is not None:
        failure = SyncError(f"rank {dist.get_rank()} has no weights: {weights.failure}")

    # The traceback of a failure references this function's variables.
    del weights
    return failure


def _in_dtype(weights: GatheredWeights, dtype: torch.dtype) -> Iterator[NamedTensor]:
    for name, tensor in weights:
        # MXFP4 blocks and scales are bytes.
        yield name, tensor if tensor.dtype == torch.uint8 else tensor.to(dtype)
        del tensor  # otherwise it would outlive its bucket
