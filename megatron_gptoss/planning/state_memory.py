"""Memory of a model's state: weights, what the optimizer keeps of them, and what a checkpoint
gathers."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_gptoss.block_sizes import PART_ELEMENTS
from megatron_gptoss.config import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.parameter_counts import (
    MXFP4_BYTES,
    adapter_parameters_per_gpu,
    bytes_of,
    head_parameters,
    parameters_per_gpu,
    trained_parameters_per_gpu,
    vocabulary_parameters,
)


@dataclass(frozen=True)
class TrainedModel:
    """A model with an optimizer: the policy, or a critic."""

    optimizer: OptimizerConfig
    dense: float
    """Parameters of one rank."""
    expert: float
    """Parameters of one rank."""


def trained_models(inputs: MemoryInputs, stage: int) -> Iterator[TrainedModel]:
    dense, expert = trained_parameters(inputs, stage)
    yield TrainedModel(inputs.optimizer, dense, expert)

    # A critic has no vocabulary to predict.
    is_last = stage == inputs.parallel.pipeline - 1
    if is_last and inputs.adapter is None:
        dense -= head_parameters(inputs.model, inputs.parallel)
    for optimizer in inputs.auxiliary_models:
        if optimizer is not None:
            yield TrainedModel(optimizer, dense, expert)


def trained_parameters(inputs: MemoryInputs, stage: int) -> tuple[float, float]:
    return trained_parameters_per_gpu(inputs.model, inputs.parallel, inputs.adapter, stage)


def weight_memory(inputs: MemoryInputs, stage: int) -> float:
    """Return the weights of all models, and the memory that merged or rounded ones share."""
    # Every auxiliary model has the policy's architecture, layout and adapters.
    weights = _model_weights(inputs, stage) * (1 + len(inputs.auxiliary_models))
    weights += shared_weight_bytes(inputs)

    if stage == inputs.parallel.pipeline - 1:
        critics = [optimizer for optimizer in inputs.auxiliary_models if optimizer is not None]
        for _ in critics:
            weights -= 2 * head_parameters(inputs.model, inputs.parallel)
    return weights


def _model_weights(inputs: MemoryInputs, stage: int) -> float:
    """Return one model's weights: bf16, but for experts that are frozen in MXFP4."""
    model = inputs.model
    parallel = inputs.parallel
    weights = 2 * sum(parameters_per_gpu(model, parallel, stage))
    if inputs.adapter is None:
        return weights

    weights += 2 * sum(adapter_parameters_per_gpu(model, parallel, inputs.adapter, stage))
    if parallel.base == "mxfp4":
        experts = parallel.layers_of_stage(stage, model) * model.num_experts / parallel.expert
        matrices = experts * 3 * model.hidden_size * model.intermediate_size
        weights -= (2 - MXFP4_BYTES) * matrices
    return weights


def shared_weight_bytes(inputs: MemoryInputs) -> float:
    """Return the memory that all layers share for merged or rounded weights; 0 where there are none."""
    if inputs.adapter is None and inputs.quantization is None:
        return 0.0
    return merged_weight_bytes(inputs.model, inputs.parallel)


def dequantized_bytes(inputs: MemoryInputs) -> float:
    """Return the memory in which a frozen matrix in four bits becomes bf16 before it is merged: the
    largest of a layer, gate and up projections of a rank's experts."""
    if inputs.adapter is None or inputs.parallel.base != "mxfp4":
        return 0.0
    return 2 / 3 * merged_weight_bytes(inputs.model, inputs.parallel)


def merged_weight_bytes(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the bytes of the memory in which the experts of a rank are dequantized and merged, or
    rounded to MXFP4. All layers share it; gate and up projections, and down projections, have a part each."""
    experts = model.num_experts / parallel.expert
    return 2 * experts * 3 * model.intermediate_size * model.hidden_size


def optimizer_state(trained: TrainedModel, parallel: ParallelConfig) -> float:
    """Return the bytes of the optimizer's state, which data-parallel ranks share out."""
    dense_shards = parallel.world_size // (parallel.tensor * parallel.pipeline)
    expert_shards = parallel.world_size // (parallel.pipeline * parallel.expert)

    shares = trained.dense / dense_shards + trained.expert / expert_shards
    return _bytes_per_parameter(trained) * shares


def _bytes_per_parameter(trained: TrainedModel) -> int:
    """Return the bytes of optimizer state: the 16 bits that complete a bf16 weight to fp32, and two
    moments."""
    return 2 + 2 * bytes_of(trained.optimizer.moment_dtype)


def fetched_state(inputs: MemoryInputs, trained: TrainedModel) -> float:
    """Return the bytes of the offloaded state that is on the GPU at a time."""
    parallel = inputs.parallel
    dense_shards = parallel.world_size // (parallel.tensor * parallel.pipeline)
    largest_parameter = vocabulary_parameters(inputs.model, parallel) / dense_shards
    part = _bytes_per_parameter(trained) * max(PART_ELEMENTS, largest_parameter)
    return min(part, trained.optimizer.offload * optimizer_state(trained, parallel))


def gathered_for_checkpoint(inputs: MemoryInputs) -> float:
    """Return what Megatron gathers of the largest parameter's state at a time, in fp32: every
    rank's share, and its own once more."""
    shares = inputs.parallel.data * inputs.parallel.context
    return 4 * _largest_trained_parameter(inputs) * (1 + 1 / shares)


def _largest_trained_parameter(inputs: MemoryInputs) -> float:
    """Return the values of the largest parameter of a rank that is trained."""
    model = inputs.model
    adapter = inputs.adapter
    if adapter is None:
        return max(vocabulary_parameters(model, inputs.parallel), model.expert_parameters)

    largest = max(model.query_size, model.hidden_size) * adapter.rank
    if "experts" not in adapter.targets:
        return largest

    # One parameter of all experts of the rank.
    experts = model.num_experts / inputs.parallel.expert
    widest = max(model.hidden_size, 2 * model.intermediate_size)
    return max(largest, experts * widest * adapter.rank_of_experts(model))
