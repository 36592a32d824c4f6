"""Starting and stopping the process groups of one trainer rank."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.cpu_runtime import enable_cpu_runtime


def initialize(parallel: ParallelConfig, rank: int = 0, master: str = "127.0.0.1", port: int = 29500) -> None:
    """Join ``parallel.world_size`` ranks and lay Megatron's groups over them. Collective.

    NCCL on GPUs (the local rank comes from LOCAL_RANK), gloo on CPUs. RuntimeError if another layout is active."""
    enable_cpu_runtime()
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialised already in this process; call shutdown() first")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    timeout = timedelta(minutes=10)
    # not by a tcp:// address: under torchrun that makes every rank a client of a store that nobody serves
    store = dist.TCPStore(master, port, parallel.world_size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=parallel.world_size, timeout=timeout
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
    )
    # the model has no dropout; Megatron only asks that its tracker exists. The inference tracker needs no CUDA.
    model_parallel_cuda_manual_seed(0, inference_rng_tracker=not on_gpu, force_reset_rng=True)


def shutdown() -> None:
    """Leave all groups, so that the process may initialise again."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
