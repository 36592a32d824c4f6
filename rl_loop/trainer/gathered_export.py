"""Writing the policy as a Hugging Face directory, from the rank that the weights are gathered on."""

import torch.distributed as dist

from converters.gathering import WeightGathering
from rl_loop.trainer.weight_export import WeightExport


def export_weights(gathering: WeightGathering, export: WeightExport) -> None:
    """Gather all weights on rank 0, which writes them. Collective.

    All ranks begin every layer together, so that none waits longer for a message than rank 0 takes
    to write one layer. A rank 0 that cannot write goes on with the messages that the others wait
    for, and nothing is replaced if a rank could not read its own weights.

    Raises:
        ConversionError: on rank 0, as ``WeightExport.write`` does; on every rank, as
            ``WeightGathering.confirmed`` does.
        GatheringRefused: on every rank, if one has no memory for its part.
    """
    weights = gathering.confirmed(gathering.begin(packed=export.packed, paced=True))
    try:
        if dist.get_rank() == 0:
            export.write(gathering.config, weights)
    finally:
        for _ in weights:
            pass  # all of it on other ranks, and what a failure has left on this one
