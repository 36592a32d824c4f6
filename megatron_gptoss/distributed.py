"""Starting and stopping the process groups of one trainer rank."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.cpu_runtime import enable_cpu_runtime
from megatron_gptoss.rendezvous import rank_store

TIMEOUT = timedelta(minutes=10)
"""For joining, and for every collective call."""


def initialize(
    parallel: ParallelConfig,
    rank: int = 0,
    master: str = "127.0.0.1",
    port: int = 29500,
    store_file: Path | None = None,
) -> None:
    """Join ``parallel.world_size`` ranks and lay Megatron's groups over them. Collective.

    Uses NCCL on GPUs (the local rank comes from LOCAL_RANK), gloo on CPUs.

    Args:
        parallel: layout of the ranks.
        rank: index of this rank.
        master: address of rank 0, where ranks on several machines meet.
        port: free port there.
        store_file: path where ranks on one machine meet instead. Other users cannot reach it.

    Raises:
        RuntimeError: if another layout is active in this process.
    """
    enable_cpu_runtime()
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialised already in this process; call shutdown() first"
        )

    _join_ranks(parallel.world_size, rank, master, port, store_file)
    _create_groups(parallel)

    # The model has no dropout, but Megatron asks that its tracker of random states exists. The one
    # for inference needs no CUDA.
    model_parallel_cuda_manual_seed(
        0,
        inference_rng_tracker=not torch.cuda.is_available(),
        force_reset_rng=True,
    )


def _join_ranks(
    world_size: int, rank: int, master: str, port: int, store_file: Path | None
) -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))

    # With a tcp:// address instead of a store, torchrun's environment would make every rank a
    # client of a store that nobody serves.
    store = rank_store(world_size, rank, master, port, store_file, TIMEOUT)
    with _gloo_on_loopback() if world_size == 1 else nullcontext():
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """Let groups of gloo that this process makes listen on loopback, as no other process joins."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        # Later groups of this process may reach servers on other machines.
        del os.environ["GLOO_SOCKET_IFNAME"]


def _create_groups(parallel: ParallelConfig) -> None:
    # Megatron takes any number of chunks, even 1, for an interleaved schedule.
    virtual_pipeline = None
    if parallel.virtual_pipeline > 1:
        virtual_pipeline = parallel.virtual_pipeline

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=virtual_pipeline,
        context_parallel_size=parallel.context,
        # Experts are spread over ranks whole; each one's products are small already.
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
    )


def shutdown() -> None:
    """Leave all groups, so that the process may initialize again."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()

    # Megatron's models refer to their groups and, in circles, to themselves; each group of gloo
    # has threads until it is collected. What a trainer exempted from collection is part of it.
    gc.unfreeze()
    gc.collect()
