"""Megatron's data-parallel wrapper and optimizer, set up for GPT-OSS."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import (
    ParamGroupOverride,
    clip_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey

from megatron_gptoss.config import OptimizerConfig
from megatron_gptoss.gpu_memory import give_back_cache
from megatron_gptoss.planning.state_memory import bucket_parameters

_megatron_applier = clip_grads.multi_tensor_applier


def wrap_data_parallel(
    chunks: Sequence[torch.nn.Module],
    model_config: Any,
    config: OptimizerConfig,
) -> list[DistributedDataParallel]:
    """Wrap the chunks of a model, so that their gradients are summed over data-parallel ranks.

    On a GPU what is trained moves into Megatron's buffers. Where optimizer state is offloaded it
    is never there twice.
    """
    on_gpu = torch.cuda.is_available()
    reduction = DistributedDataParallelConfig(
        use_distributed_optimizer=on_gpu,
        overlap_grad_reduce=on_gpu,
        overlap_param_gather=on_gpu,
        grad_reduce_in_fp32=_sums_gradients_in_fp32(model_config.params_dtype, config),
        # The trainer checks by itself, and then skips the step or names the parameters.
        check_for_nan_in_grad=False,
        # Losses are normalised over the global batch already: gradients are summed.
        average_in_collective=False,
    )
    if config.offload:
        _move_to_host(chunks)
    wrapped = []
    for chunk in chunks:
        layout = _cut_into_buckets(chunk, reduction) if on_gpu else None
        wrapped.append(
            DistributedDataParallel(model_config, reduction, chunk, full_param_layout=layout)
        )

    # Gradients are reduced after the last micro-batch only: Megatron's schedules enter this context
    # for all others. The interleaved one takes a list, those of one chunk a function.
    no_sync = [chunk.no_sync for chunk in wrapped]
    model_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def _cut_into_buckets(chunk: torch.nn.Module, reduction: DistributedDataParallelConfig) -> Any:
    """Lay out the buckets of what is trained of a chunk, on every pipeline stage alike.

    By itself Megatron cuts on the first stage only, as the reductions of others are not on the
    critical path. But it also gathers optimizer state for a checkpoint a bucket at a time, in fp32
    on the GPU: 57 GB of the 120B on two stages of eight ranks, if its experts are one bucket.
    """
    return DistributedOptimizer.compute_full_param_layout(
        [parameter for parameter in chunk.parameters() if parameter.requires_grad],
        bucket_size=bucket_parameters(parallel_state.get_data_parallel_world_size()),
        data_parallel_world_size=parallel_state.get_data_parallel_world_size(
            with_context_parallel=True
        ),
        ddp_config=reduction,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(),
    )


def _move_to_host(chunks: Sequence[torch.nn.Module]) -> None:
    """Move the parameters that are trained to host memory.

    Megatron makes its buffers first, and then copies one parameter after the other into them. The
    host has room: optimizer state that takes more comes with the first step.
    """
    for chunk in chunks:
        for parameter in chunk.parameters():
            # What is frozen gets no buffer and stays.
            if parameter.requires_grad:
                parameter.data = parameter.data.cpu()
    give_back_cache()


def build_optimizer(
    wrapped: Sequence[DistributedDataParallel],
    dtype: torch.dtype,
    config: OptimizerConfig,
) -> Any:
    """Build Megatron's Adam over wrapped chunks whose parameters have ``dtype``."""
    on_gpu = torch.cuda.is_available()
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=on_gpu,
        **(precision_settings(config) if on_gpu and dtype == torch.bfloat16 else {}),
    )

    # The fp32 biases of the routers get a group of their own: Megatron confuses the order of a
    # group of two dtypes when it saves the optimizer. ``start_wd`` only tells the groups apart.
    router_biases = {
        ParamKey(name="*.router.bias"): ParamGroupOverride(start_wd=config.weight_decay)
    }
    overrides = get_standard_config_overrides(settings) | router_biases
    optimizer = get_megatron_optimizer(settings, wrapped, config_overrides=overrides)

    # Gradients then keep their parameters' dtypes. Megatron looks this function up when it clips.
    if not _sums_gradients_in_fp32(dtype, config):
        clip_grads.multi_tensor_applier = one_dtype_at_a_time
    return optimizer


def precision_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return the dtypes of gradients and moments for bf16 weights on a GPU.

    Transformer Engine's Adam keeps fp32 master weights as the 16 bits that the bf16 weights lack.
    """
    moments = torch.bfloat16 if config.moment_dtype == "bf16" else torch.float32
    gradients = torch.bfloat16 if config.gradient_dtype == "bf16" else torch.float32
    return {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": gradients,
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
    }


def _sums_gradients_in_fp32(dtype: torch.dtype, config: OptimizerConfig) -> bool:
    if dtype == torch.float64:
        return False
    return not (torch.cuda.is_available() and config.gradient_dtype == "bf16")


def one_dtype_at_a_time(
    operation: Any,
    overflow: torch.Tensor,
    lists: list[list[torch.Tensor]],
    *options: Any,
) -> Any:
    """Apply Megatron's ``multi_tensor_applier`` to the tensors of each dtype by themselves.

    Transformer Engine takes all tensors of a list for the dtype of the first, and gradients have
    several dtypes: those of bf16 weights and of the routers' fp32 biases. Megatron calls it for
    norms, which are combined here, and for scaling in place.
    """
    results = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in lists[0]):
        same_dtype = [[tensor for tensor in tensors if tensor.dtype == dtype] for tensors in lists]
        results.append(_megatron_applier(operation, overflow, same_dtype, *options))

    # None: scaled in place, or no elements.
    norms = [result[0] for result in results if result is not None]
    if not norms:
        return None
    return torch.stack(norms).norm(dim=0), None
