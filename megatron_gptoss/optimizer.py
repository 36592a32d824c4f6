"""Set-up of Megatron's data-parallel wrapper and optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

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
from megatron_gptoss.gpu_memory import release_cached_memory
from megatron_gptoss.planning.state_memory import bucket_parameters

_megatron_applier = clip_grads.multi_tensor_applier


@dataclass(frozen=True)
class AdamSettings:
    """Settings of one optimizer step, as in ``OptimizerConfig``."""

    learning_rate: float
    """Learning rate."""
    beta1: float
    """Decay rate of the first moment."""
    beta2: float
    """Decay rate of the second moment."""
    eps: float
    """Constant added to the root of the second moment."""
    weight_decay: float
    """Decoupled weight decay of matrices."""
    clip_grad: float
    """Maximum global gradient norm. Infinity to clip nothing."""

    @classmethod
    def of(cls, config: OptimizerConfig, learning_rate: float) -> Self:
        """Return the settings of a configuration with the learning rate of a step."""
        return cls(
            learning_rate=learning_rate,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
        )


def apply_settings(optimizer: Any, settings: AdamSettings) -> None:
    """Set the options of the next step of Megatron's optimizer."""
    # This loop replaces Megatron's OptimizerParamScheduler, which applies ``wd_mult``. It is 0 for
    # biases, norms and sinks, because decay would pull the model towards one without them.
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate
        group["betas"] = (settings.beta1, settings.beta2)
        group["eps"] = settings.eps
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    for chained in optimizer.chained_optimizers:
        chained.config.clip_grad = settings.clip_grad


def wrap_data_parallel(
    chunks: Sequence[torch.nn.Module],
    model_config: Any,
    config: OptimizerConfig,
) -> list[DistributedDataParallel]:
    """Wrap the chunks of a model in Megatron's data parallelism. Collective.

    On a GPU, trained parameters move into Megatron's buffers.

    Args:
        chunks: chunks of the model.
        model_config: configuration of the model, in which a hook is set.
        config: settings of the optimizer.
    """
    on_gpu = torch.cuda.is_available()
    reduction = DistributedDataParallelConfig(
        use_distributed_optimizer=on_gpu,
        overlap_grad_reduce=on_gpu,
        overlap_param_gather=on_gpu,
        grad_reduce_in_fp32=_sums_gradients_in_fp32(model_config.params_dtype, config),
        # The trainer checks gradients, and skips the step or names the parameters.
        check_for_nan_in_grad=False,
        # Losses are normalized over the global batch, so gradients are summed.
        average_in_collective=False,
    )
    if config.offload_fraction:
        _move_to_host(chunks)
    wrapped = []
    for chunk in chunks:
        layout = _cut_into_buckets(chunk, reduction) if on_gpu else None
        wrapped.append(
            DistributedDataParallel(model_config, reduction, chunk, full_param_layout=layout)
        )

    # Gradients are reduced after the last micro-batch only. Megatron's schedules enter this context
    # for all others. The interleaved schedule needs a list, the other schedules a function.
    no_sync = [chunk.no_sync for chunk in wrapped]
    model_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def _cut_into_buckets(chunk: torch.nn.Module, reduction: DistributedDataParallelConfig) -> Any:
    """Return a layout of gradient buckets for a chunk, on every pipeline stage."""
    # Megatron uses several buckets on the first stage only, because the reductions of other stages
    # are not on the critical path. But it also gathers optimizer state for a checkpoint one bucket
    # at a time, in fp32 on the GPU. For the 120B model on two stages of eight ranks, a single
    # bucket of experts would need 57 GB.
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
    """Move trained parameters to host memory."""
    # Megatron allocates its buffers first and then copies the parameters into them, so parameters
    # would exist twice on the GPU. The host has memory for them: offloaded optimizer state, which
    # needs more, is created in the first step.
    for chunk in chunks:
        for parameter in chunk.parameters():
            # Frozen parameters are not copied into a buffer.
            if parameter.requires_grad:
                parameter.data = parameter.data.cpu()
    release_cached_memory()


def build_optimizer(
    wrapped: Sequence[DistributedDataParallel],
    dtype: torch.dtype,
    config: OptimizerConfig,
) -> Any:
    """Build Megatron's Adam.

    Args:
        wrapped: result of ``wrap_data_parallel``.
        dtype: data type of the parameters.
        config: settings of the optimizer.
    """
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

    # The fp32 router biases need a separate group, because Megatron confuses the order of a group
    # with two dtypes when it saves the optimizer. ``start_wd`` only distinguishes the groups.
    router_biases = {
        ParamKey(name="*.router.bias"): ParamGroupOverride(start_wd=config.weight_decay)
    }
    overrides = get_standard_config_overrides(settings) | router_biases
    optimizer = get_megatron_optimizer(settings, wrapped, config_overrides=overrides)

    # Without fp32 gradients, gradients have several dtypes. Megatron calls this function to clip.
    if not _sums_gradients_in_fp32(dtype, config):
        clip_grads.multi_tensor_applier = apply_per_dtype
    return optimizer


def precision_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return Megatron's options for the dtypes of gradients and moments, for bf16 weights on a GPU.

    Transformer Engine's Adam stores the lower 16 bits of fp32 master weights. The bf16 weights are
    the upper bits.
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
    """Return True if gradients are accumulated in fp32, False for the dtype of the parameter."""
    if dtype == torch.float64:
        return False
    return not (torch.cuda.is_available() and config.gradient_dtype == "bf16")


def apply_per_dtype(
    operation: Any,
    overflow: torch.Tensor,
    lists: list[list[torch.Tensor]],
    *options: Any,
) -> Any:
    """Apply Megatron's ``multi_tensor_applier`` to the tensors of each dtype separately.

    Megatron calls it to compute norms, which are combined here, and to scale tensors in place.

    Args:
        operation: operation of Megatron or Transformer Engine.
        overflow: [1] int flag for overflow.
        lists: lists of tensors [...], with one tensor per parameter in each list.
        options: further arguments of the operation.

    Returns:
        (norm [1], None), or None if the operation returns nothing.
    """
    # Transformer Engine assumes that all tensors of a list have the dtype of the first. Gradients
    # of bf16 weights and of fp32 router biases differ.
    results = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in lists[0]):
        same_dtype = [[tensor for tensor in tensors if tensor.dtype == dtype] for tensors in lists]
        results.append(_megatron_applier(operation, overflow, same_dtype, *options))

    # The result is None after scaling, and for empty lists.
    norms = [result[0] for result in results if result is not None]
    if not norms:
        return None
    return torch.stack(norms).norm(dim=0), None
