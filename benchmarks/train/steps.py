"""Random weights and batches, losses and timing of the cases of benchmarks.train."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.harness import largest_of_ranks, synchronize
from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import LossOutput

VOCAB = 201_088


TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_size": 16,
    "vocab_size": 128,
    "sliding_window": 8,
}
"""Sizes of ``--tiny``."""


def random_weights(model: torch.nn.Module) -> None:
    """Fill a model with random weights that are equal on all replicas.

    All shards of a tensor are equal on the tensor-parallel ranks, too.
    """
    # Replicas of a parameter share a seed. Dense parameters depend on the stage, experts on the
    # stage and on the expert-parallel rank.
    stage = parallel_state.get_pipeline_model_parallel_rank()
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    device = next(model.parameters()).device.type
    dense_generator = torch.Generator(device).manual_seed(stage)
    expert_generator = torch.Generator(device).manual_seed(1000 * (expert_rank + 1) + stage)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
            elif parameter.dim() == 1:
                parameter.zero_()
            elif "experts" in name:
                parameter.normal_(0, 0.02, generator=expert_generator)
            else:
                parameter.normal_(0, 0.02, generator=dense_generator)


def random_batches(
    count: int, sequences: int, length: int, seed: int, vocabulary: int = VOCAB
) -> list[PackedBatch]:
    """Return ``count`` micro-batches of ``sequences`` sequences of ``length`` tokens.

    Args:
        count: number of micro-batches.
        sequences: sequences per micro-batch.
        length: tokens of a sequence.
        seed: seed of the tokens.
        vocabulary: number of different tokens.
    """
    samples = random_samples([length] * (count * sequences), seed, vocabulary)
    micro_batches = np.arange(count * sequences).reshape(count, sequences).tolist()
    return [build_batch(samples, numbers, align=8) for numbers in micro_batches]


def random_samples(lengths: Sequence[int], seed: int, vocabulary: int = VOCAB) -> TrainingSamples:
    """Return a sequence of random tokens for each of ``lengths``, its number of labels.

    Args:
        lengths: labels of each sequence, one less than its tokens.
        seed: seed of the tokens.
        vocabulary: number of different tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = np.cumsum([0, *(length + 1 for length in lengths)], dtype=np.int64)
    token_ids = torch.randint(0, vocabulary, (int(offsets[-1]),), generator=generator)
    return TrainingSamples(
        offsets=offsets,
        token_ids=token_ids.to(torch.int32).numpy(),
        loss_mask=np.ones(len(token_ids), np.bool_),
    )


def sft_loss(tokens: int) -> Callable[..., LossOutput]:
    """Return a loss function: the cross-entropy divided by ``tokens``."""

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch) -> LossOutput:
        total = -(log_probs * batch.loss_mask).sum() / tokens
        return LossOutput(total, {"loss": total})

    return loss


def measure_steps(
    step: Callable[[], Any],
    count: int,
    tokens_per_gpu: int,
    flops: float,
    ceiling: float,
) -> dict[str, Any]:
    """Time ``count`` calls of ``step``. The first two warm up.

    Args:
        step: runs one step.
        count: number of calls.
        tokens_per_gpu: tokens of one step per GPU.
        flops: FLOPs of one step per GPU.
        ceiling: TFLOP/s of a matrix product, for MFU.
    """
    times = []
    for i in range(count):
        if i == 2:
            # Equal to rl_loop.trainer.worker.
            gc.collect()
            gc.freeze()
        # All ranks start together, so that no rank counts the delay of another.
        synchronize()
        dist.barrier()
        start = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - start)

    seconds = median(times[2:])
    tflops = flops / seconds / 1e12
    figures = {
        "seconds": seconds,
        "all_seconds": [round(x, 4) for x in times],
        "tokens_per_second_per_gpu": tokens_per_gpu / seconds,
        "tflops_per_gpu": tflops,
    }
    if torch.cuda.is_available():
        figures |= {
            "mfu": tflops / ceiling,
            "ceiling_tflops": ceiling,
            "peak_gb": largest_of_ranks(torch.cuda.max_memory_allocated() / 1e9),
            "reserved_gb": largest_of_ranks(torch.cuda.max_memory_reserved() / 1e9),
        }
    return figures


def profile_step(step: Callable[[], Any], path: Path) -> None:
    """Write the device time and count of every kernel of one step, longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step()
        torch.cuda.synchronize()
    if dist.get_rank() != 0:
        return

    cuda = torch.autograd.DeviceType.CUDA
    kernels = [event for event in trace.key_averages() if event.device_type == cuda]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    rows = []
    for kernel in kernels:
        milliseconds = kernel.self_device_time_total / 1e3
        rows.append(f"{milliseconds:9.2f} ms {kernel.count:6d} x {kernel.key[:160]}")
    path.write_text("\n".join(rows) + "\n")
