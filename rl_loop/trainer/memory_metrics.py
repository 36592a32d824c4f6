"""Metrics of a step for the memory of a rank's GPU, measured and predicted."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron_gptoss.gpu_memory import PhasePeak
from megatron_gptoss.planning.memory import MemoryPrediction


def memory_metrics(
    peaks: Mapping[str, PhasePeak], prediction: MemoryPrediction
) -> dict[str, float]:
    """Return ``PHASE/FIGURE`` -> GB (1e9 bytes) of one GPU.

    Args:
        peaks: measured peaks of each phase: memory that torch allocated, memory that torch
            reserved, and memory in use on the whole GPU, including servers.
        prediction: predicted memory. For its phases, the predictions for tensors and for the whole GPU
            are included.
    """
    predicted = {phase.name: phase for phase in prediction.phases}

    values: dict[str, float] = {}
    for name, peak in peaks.items():
        values[f"{name}/allocated_gb"] = peak.allocated / 1e9
        values[f"{name}/reserved_gb"] = peak.reserved / 1e9
        values[f"{name}/gpu_gb"] = peak.gpu / 1e9
        if name in predicted:
            values[f"{name}/predicted_allocated_gb"] = predicted[name].trainer / 1e9
            values[f"{name}/predicted_gpu_gb"] = predicted[name].total / 1e9
    return values


def max_over_ranks(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return the maximum of every value over the ranks, which all have the same names.

    Collective, unless there are no values.
    """
    if not values:
        return {}
    # The fullest GPU decides whether a run fits.
    largest = torch.tensor(list(values.values()), dtype=torch.double, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(values, largest.tolist(), strict=True))
