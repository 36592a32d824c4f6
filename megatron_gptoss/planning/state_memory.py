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

BUCKET_PARAMETERS = 40_000_000
BUCKET_PARAMETERS_PER_RANK = 1_000_000
"""A bucket of gradients is closed when it has so many parameters, or so many for each data-parallel
rank if that is more: Megatron's defaults."""

SAVED_BYTES = 12
"""What a checkpoint has of a parameter's optimizer state: master weight and two moments, in fp32."""
WEIGHT_BYTES = 2
"""What it has of the weight itself, in bf16."""


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


def bucket_parameters(data_ranks: int) -> int:
    """Return how many parameters fill a bucket of gradients, with so many data-parallel ranks."""
    return max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK * data_ranks)


def gathered_for_checkpoint(inputs: MemoryInputs, stage: int) -> float:
    """Return the bytes that Megatron gathers at a time when it saves the optimizer: one tensor of
    the state of one bucket of parameters, in fp32; every rank's share, and its own once more."""
    gathered = 0.0
    for trained in trained_models(inputs, stage):
        for buffer in _buffers(inputs, stage, trained):
            bucket = _largest_bucket(inputs, buffer)
            gathered = max(gathered, 4 * bucket * (1 + 1 / buffer.ranks))
    return gathered


def host_memory_of_save(inputs: MemoryInputs, gpus_per_node: int) -> float:
    """Return the bytes of host memory that saving takes on the fullest node, besides offloaded state."""
    nodes: dict[int, float] = {}
    for rank in range(inputs.parallel.world_size):
        node = rank // gpus_per_node
        nodes[node] = nodes.get(node, 0.0) + host_memory_of_rank(inputs, rank)
    return max(nodes.values())


def host_memory_of_rank(inputs: MemoryInputs, rank: int) -> float:
    """Return the bytes of host memory that a rank needs while it saves, besides offloaded state.

    The first rank of a data-parallel group gathers the optimizer's state of all the parameters
    that the group shares, and holds it and a copy of their weights until it has written them.
    """
    parallel = inputs.parallel
    stage, place = divmod(rank, parallel.world_size // parallel.pipeline)
    # Ranks of a stage are numbered by tensor-parallel rank, and for experts by expert-parallel
    # rank, before data-parallel rank.
    writes_dense = place < parallel.tensor
    writes_experts = place < parallel.expert

    written = 0.0
    shares = 0.0
    for trained in trained_models(inputs, stage):
        written += trained.dense * writes_dense + trained.expert * writes_experts

        # Of a bucket on its way every rank has its own share first.
        for buffer in _buffers(inputs, stage, trained):
            shares = max(shares, SAVED_BYTES * _largest_bucket(inputs, buffer) / buffer.ranks)

    # Weights are copied last.
    return SAVED_BYTES * written + max(WEIGHT_BYTES * written, shares)


def _largest_bucket(inputs: MemoryInputs, buffer: "_Buffer") -> float:
    """Return the parameters of a buffer's largest bucket."""
    # The tensor that fills a bucket belongs to it.
    full = bucket_parameters(inputs.parallel.data) + buffer.largest
    return min(buffer.parameters, full)


@dataclass(frozen=True)
class _Buffer:
    """What Megatron keeps together of a rank's trained parameters."""

    parameters: float
    """How many there are in it."""
    largest: float
    """The numbers of its largest tensor."""
    ranks: int
    """So many share their optimizer state out."""


def _buffers(inputs: MemoryInputs, stage: int, trained: TrainedModel) -> list[_Buffer]:
    """Return the buffers of the fullest chunk of a model."""
    parallel = inputs.parallel
    dense_ranks = parallel.world_size // (parallel.tensor * parallel.pipeline)
    expert_ranks = parallel.world_size // (parallel.pipeline * parallel.expert)
    largest, largest_of_experts = _largest_trained_tensors(inputs)

    # Chunks have equally many layers; one of them has embedding or output layer besides.
    vocabulary = 0.0
    if stage in (0, parallel.pipeline - 1) and inputs.adapter is None:
        vocabulary = min(trained.dense, vocabulary_parameters(inputs.model, parallel))
    dense = (trained.dense - vocabulary) / parallel.virtual_pipeline + vocabulary
    expert = trained.expert / parallel.virtual_pipeline

    # Without expert and tensor parallelism experts have no buffer of their own.
    if parallel.expert == 1 and parallel.tensor == 1:
        return [_Buffer(dense + expert, max(largest, largest_of_experts), dense_ranks)]
    return [
        _Buffer(dense, largest, dense_ranks),
        _Buffer(expert, largest_of_experts, expert_ranks),
    ]


def _largest_trained_tensors(inputs: MemoryInputs) -> tuple[float, float]:
    """Return the numbers of a rank's largest trained tensor outside of experts, and of experts."""
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

    # One parameter of all experts of the rank.
    experts = model.num_experts / inputs.parallel.expert
    widest = max(model.hidden_size, 2 * model.intermediate_size)
    return largest, experts * widest * adapter.rank_of_experts(model)
