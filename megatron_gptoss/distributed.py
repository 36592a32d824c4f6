"""Creation and destruction of a trainer rank's process groups."""

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
"""Time limit for joining and for every collective call."""


def initialize(
    parallel: ParallelConfig,
    rank: int = 0,
    master: str = "127.0.0.1",
    port: int = 29500,
    store_file: Path | None = None,
) -> None:
    """Join the ranks of a run and create Megatron's process groups. Collective.

    The backend is NCCL on GPUs and gloo on CPUs. LOCAL_RANK selects the GPU.

    Args:
        parallel: layout of the ranks.
        rank: index of this rank.
        master: address of rank 0, for ranks on several machines.
        port: free port at that address.
        store_file: path of a file for ranks on one machine, used instead of the address. Other
            users cannot access it.

    Raises:
        RuntimeError: this process already has process groups.
    """
    enable_cpu_runtime()
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is already initialized in this process. Call shutdown() first"
        )

    _join_ranks(parallel.world_size, rank, master, port, store_file)
    _create_groups(parallel)

    # The model has no dropout, but Megatron requires its tracker of random states. The tracker for
    # inference works without CUDA.
    model_parallel_cuda_manual_seed(
        0,
        inference_rng_tracker=not torch.cuda.is_available(),
        force_reset_rng=True,
    )


def _join_ranks(
    world_size: int, rank: int, master: str, port: int, store_file: Path | None
) -> None:
    """Create the default process group."""
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))

    # Pass a store instead of a tcp:// address: in torchrun's environment, every rank would
    # otherwise connect to a store without a server.
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
    """Make gloo listen on the loopback interface in the block, for groups of a single process."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        # Later groups of this process may have members on other machines.
        del os.environ["GLOO_SOCKET_IFNAME"]


def _create_groups(parallel: ParallelConfig) -> None:
    """Create Megatron's process groups."""
    # Megatron uses the interleaved schedule for any number of chunks, even for 1.
    virtual_pipeline = None
    if parallel.virtual_pipeline > 1:
        virtual_pipeline = parallel.virtual_pipeline

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=virtual_pipeline,
        context_parallel_size=parallel.context,
        # Ranks hold whole experts, because the products of one expert are small.
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
    )


def shutdown() -> None:
    """Destroy all groups, so that the process can initialize again."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()

    # Megatron's models hold references to groups, and have reference cycles. A gloo group keeps its
    # threads until it is collected. unfreeze() includes objects that a trainer has frozen.
    gc.unfreeze()
    gc.collect()
