"""Prediction of the memory for weights, optimizer state, and gathering for checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_gptoss.block_sizes import PART_ELEMENTS
from megatron_gptoss.config import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_gptoss.config.precision import bytes_per_number
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.parameter_counts import (
    MXFP4_BYTES,
    adapter_parameters_per_gpu,
    head_parameters,
    parameters_per_gpu,
    trained_parameters_per_gpu,
    vocabulary_parameters,
)

# The defaults of Megatron. The larger of both limits closes a bucket.
BUCKET_PARAMETERS = 40_000_000
"""Minimum number of parameters in a full gradient bucket."""
BUCKET_PARAMETERS_PER_RANK = 1_000_000
"""Minimum number of parameters in a full gradient bucket, per data-parallel rank."""

SAVED_BYTES = 12
"""Bytes of optimizer state per parameter in a checkpoint: master weight and two moments in fp32."""
WEIGHT_BYTES = 2
"""Bytes per weight in a checkpoint, in bf16."""


@dataclass(frozen=True)
class TrainedModel:
    """Model with an optimizer: the policy or a critic."""

    optimizer: OptimizerConfig
    """Optimizer of the model."""
    dense: float
    """One rank's trained parameters outside of experts."""
    expert: float
    """Trained parameters of one rank in experts."""


def trained_models(inputs: MemoryInputs, stage: int) -> Iterator[TrainedModel]:
    """Yield the policy and the critics, with their trained parameters on one rank of a stage.

    Args:
        inputs: models and layout.
        stage: index of the pipeline stage.
    """
    dense, expert = trained_parameters(inputs, stage)
    yield TrainedModel(inputs.optimizer, dense, expert)

    # A critic has a value head instead of the output layer.
    is_last = stage == inputs.parallel.pipeline - 1
    if is_last and inputs.adapter is None:
        dense -= head_parameters(inputs.model, inputs.parallel)
    for optimizer in inputs.auxiliary_models:
        if optimizer is not None:
            yield TrainedModel(optimizer, dense, expert)


def trained_parameters(inputs: MemoryInputs, stage: int) -> tuple[float, float]:
    """Return the trained (dense, expert) parameters of the policy on one rank of a stage.

    Args:
        inputs: models and layout.
        stage: index of the pipeline stage.
    """
    return trained_parameters_per_gpu(inputs.model, inputs.parallel, inputs.adapter, stage)


def weight_memory(inputs: MemoryInputs, stage: int) -> float:
    """Return the weight bytes of all models, including merged or rounded weights.

    Args:
        inputs: models and layout.
        stage: index of the pipeline stage.
    """
    # Every auxiliary model has the architecture, layout and adapters of the policy.
    weights = _model_weights(inputs, stage) * (1 + len(inputs.auxiliary_models))
    weights += scratch_weight_bytes(inputs)
    for teacher in inputs.teachers:
        weights += 2 * sum(parameters_per_gpu(teacher, inputs.parallel, stage))

    if stage == inputs.parallel.pipeline - 1:
        critics = [optimizer for optimizer in inputs.auxiliary_models if optimizer is not None]
        for _ in critics:
            weights -= 2 * head_parameters(inputs.model, inputs.parallel)
    return weights


def _model_weights(inputs: MemoryInputs, stage: int) -> float:
    """Return the bytes of one model's weights: bf16, except frozen experts in MXFP4."""
    model = inputs.model
    parallel = inputs.parallel
    weights = 2 * sum(parameters_per_gpu(model, parallel, stage))
    if inputs.adapter is None:
        return weights

    weights += 2 * sum(adapter_parameters_per_gpu(model, parallel, inputs.adapter, stage))
    if inputs.has_mxfp4_base:
        experts = parallel.layers_of_stage(stage, model) * model.num_experts / parallel.expert
        matrices = experts * 3 * model.hidden_size * model.intermediate_size
        weights -= (2 - MXFP4_BYTES) * matrices
    return weights


def scratch_weight_bytes(inputs: MemoryInputs) -> float:
    """Return the bytes of the memory for merged, rounded or read weights, which all layers share.

    The result is 0 without adapters and quantization.
    """
    if inputs.adapter is None and inputs.quantization is None:
        return 0.0

    scratch = merged_weight_bytes(inputs.model, inputs.parallel)
    if inputs.adapter is not None and not inputs.adapter.merge_experts:
        # Unmerged products copy a matrix to append columns. The largest is 2 of 3 expert matrices of a layer.
        scratch += 2 / 3 * scratch
    return scratch


def dequantized_bytes(inputs: MemoryInputs) -> float:
    """Return the bytes of the memory in which a frozen MXFP4 matrix is dequantized before merging.

    The result is 0 for bf16 weights.
    """
    if not inputs.has_mxfp4_base:
        return 0.0
    # The largest matrix of a layer: gate and up projections, 2 of 3 expert matrices.
    return 2 / 3 * merged_weight_bytes(inputs.model, inputs.parallel)


def merged_weight_bytes(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the bytes of the memory in which a rank's experts are merged or rounded.

    All layers share it. Gate and up projections have one part of it, down projections another.

    Args:
        model: architecture.
        parallel: layout.
    """
    experts = model.num_experts / parallel.expert
    return 2 * experts * 3 * model.intermediate_size * model.hidden_size


def optimizer_state(trained: TrainedModel, parallel: ParallelConfig) -> float:
    """Return the bytes of a model's optimizer state on one rank.

    Args:
        trained: model with its trained parameters.
        parallel: layout.
    """
    # The distributed optimizer splits state over all ranks that hold copies of a parameter. Context
    # parallelism copies parameters, too.
    dense_shards = parallel.world_size // (parallel.tensor * parallel.pipeline)
    expert_shards = parallel.world_size // (parallel.pipeline * parallel.expert)

    shares = trained.dense / dense_shards + trained.expert / expert_shards
    return _bytes_per_parameter(trained) * shares


def _bytes_per_parameter(trained: TrainedModel) -> int:
    """Return the bytes of optimizer state per parameter.

    They are the lower 16 bits of the fp32 master weight, and two moments.
    """
    return 2 + 2 * bytes_per_number(trained.optimizer.moment_dtype)


def loaded_state_bytes(inputs: MemoryInputs, trained: TrainedModel) -> float:
    """Return the bytes of offloaded state that are on the GPU at the same time.

    Args:
        inputs: models and layout.
        trained: model whose optimizer steps.
    """
    # A part holds whole tensors, and the largest tensor is the embedding or the output layer.
    parallel = inputs.parallel
    dense_shards = parallel.world_size // (parallel.tensor * parallel.pipeline)
    largest_parameter = vocabulary_parameters(inputs.model, parallel) / dense_shards
    part = _bytes_per_parameter(trained) * max(PART_ELEMENTS, largest_parameter)
    return min(part, trained.optimizer.offload_fraction * optimizer_state(trained, parallel))


def bucket_parameters(data_ranks: int) -> int:
    """Return the number of parameters that fill a gradient bucket."""
    return max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK * data_ranks)


def gathered_for_checkpoint(inputs: MemoryInputs, stage: int) -> float:
    """Return the GPU bytes for gathering one state tensor of one bucket while saving.

    Args:
        inputs: models and layout.
        stage: index of the pipeline stage.
    """
    # In fp32: the parts of all ranks, and this rank's own part a second time.
    gathered = 0.0
    for trained in trained_models(inputs, stage):
        for buffer in _buffers(inputs, stage, trained):
            bucket = _largest_bucket(inputs, buffer)
            gathered = max(gathered, 4 * bucket * (1 + 1 / buffer.ranks))
    return gathered


def host_memory_of_save(inputs: MemoryInputs, gpus_per_node: int) -> float:
    """Return the bytes of host memory for saving on the fullest node, without offloaded state.

    Args:
        inputs: models and layout.
        gpus_per_node: number of ranks on a node.
    """
    nodes: dict[int, float] = {}
    for rank in range(inputs.parallel.world_size):
        node = rank // gpus_per_node
        nodes[node] = nodes.get(node, 0.0) + host_memory_of_rank(inputs, rank)
    return max(nodes.values())


def host_memory_of_rank(inputs: MemoryInputs, rank: int) -> float:
    """Return the bytes of host memory for saving on one rank, without offloaded state.

    Args:
        inputs: models and layout.
        rank: global rank.
    """
    # The first rank of a data-parallel group gathers the group's whole parameter state. It
    # holds the state and a copy of the weights until they are written.
    parallel = inputs.parallel
    stage, place = divmod(rank, parallel.world_size // parallel.pipeline)
    # Megatron numbers the ranks of a stage by tensor-parallel rank first, and for experts by
    # expert-parallel rank first.
    writes_dense = place < parallel.tensor
    writes_experts = place < parallel.expert

    written = 0.0
    shares = 0.0
    for trained in trained_models(inputs, stage):
        written += trained.dense * writes_dense + trained.expert * writes_experts

        # Every rank first copies its own part of a bucket to the host.
        for buffer in _buffers(inputs, stage, trained):
            shares = max(shares, SAVED_BYTES * _largest_bucket(inputs, buffer) / buffer.ranks)

    # Weights are copied last, after the parts of buckets have been freed.
    return SAVED_BYTES * written + max(WEIGHT_BYTES * written, shares)


def _largest_bucket(inputs: MemoryInputs, buffer: "_Buffer") -> float:
    """Return the number of parameters in the largest bucket of a buffer."""
    # The tensor that exceeds the limit still belongs to the bucket.
    full = bucket_parameters(inputs.parallel.data) + buffer.largest
    return min(buffer.parameters, full)


@dataclass(frozen=True)
class _Buffer:
    """Megatron's buffer of trained parameters on one rank."""

    parameters: float
    """Number of parameters."""
    largest: float
    """Elements in the largest tensor."""
    ranks: int
    """Number of ranks over which the optimizer state is split."""


def _buffers(inputs: MemoryInputs, stage: int, trained: TrainedModel) -> list[_Buffer]:
    """Return the buffers of the largest virtual-pipeline chunk of a model."""
    parallel = inputs.parallel
    dense_ranks = parallel.world_size // (parallel.tensor * parallel.pipeline)
    expert_ranks = parallel.world_size // (parallel.pipeline * parallel.expert)
    largest, largest_of_experts = _largest_trained_tensors(inputs)

    # All chunks have the same number of layers. One of them also has the embedding or output layer.
    vocabulary = 0.0
    if stage in (0, parallel.pipeline - 1) and inputs.adapter is None:
        vocabulary = min(trained.dense, vocabulary_parameters(inputs.model, parallel))
    dense = (trained.dense - vocabulary) / parallel.virtual_pipeline + vocabulary
    expert = trained.expert / parallel.virtual_pipeline

    # Experts have a separate buffer only with expert or tensor parallelism.
    if parallel.expert == 1 and parallel.tensor == 1:
        return [_Buffer(dense + expert, max(largest, largest_of_experts), dense_ranks)]
    return [
        _Buffer(dense, largest, dense_ranks),
        _Buffer(expert, largest_of_experts, expert_ranks),
    ]


def _largest_trained_tensors(inputs: MemoryInputs) -> tuple[float, float]:
    """Return the elements of a rank's largest trained tensor outside of and in experts."""
    model = inputs.model
    adapter = inputs.adapter
    if adapter is None:
        vocabulary = vocabulary_parameters(model, inputs.parallel)
        return vocabulary, 2 * model.intermediate_size * model.hidden_size

    rows = max(model.query_size, model.hidden_size)
    if {"embedding", "head"} & set(adapter.targets):
        rows = max(rows, model.vocab_size)
    largest = rows * adapter.rank
    if "experts" not in adapter.targets:
        return largest, 0.0

    # An adapter of experts is one parameter for all experts of the rank.
    experts = model.num_experts / inputs.parallel.expert
    widest = max(model.hidden_size, 2 * model.intermediate_size)
    return largest, experts * widest * adapter.rank_of_experts(model)
