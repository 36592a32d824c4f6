"""Prediction of a training step's time on H200 GPUs, from the configuration.

docs/performance/layers_and_pipelines.md compares predictions with measurements.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from megatron_gptoss.config import (
    AdapterConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Quantization,
)
from megatron_gptoss.config.precision import bytes_per_number
from megatron_gptoss.planning.flops import forward_flops, training_flops
from megatron_gptoss.planning.parameter_counts import (
    MXFP4_BYTES,
    trained_parameters_per_gpu,
)

GPUS_PER_NODE = 8
"""GPUs per node, which NVLink connects."""
# Fitted together with HALF_SPEED_ROWS. With these constants, predictions are within 11% of runs with
# 16k tokens per micro-batch, except on a slow machine and with tensor parallelism.
LAYER_RATE = 520e12
"""FLOP/s of the layers, forward and backward, if every expert has many rows."""
# Measured (docs/performance/layers_and_pipelines.md, output layer).
OUTPUT_LAYER_RATE = 458e12
"""FLOP/s of the output layer, which computes its logits twice."""
HALF_SPEED_ROWS = 1150
"""Rows per expert in a micro-batch at which the layers reach half of LAYER_RATE."""
# Measured with NVLink.
NODE_BANDWIDTH = 180e9
"""Bytes per second of one GPU in the all-to-all of experts within a node."""
# Assumed: one 400 Gb/s adapter per GPU, at 80%.
NETWORK_BANDWIDTH = 40e9
"""Bytes per second of one GPU to other nodes."""
# Profiled on an H200: 77 ms of optimizer kernels for 214 GB.
MEMORY_BANDWIDTH = 2.8e12
"""Bytes per second of memory-bound kernels."""
# Fitted to merging updates of ranks 0, 8 and 32 into the experts of one layer of the 20B model on
# an H200. A rank takes one multiply-add per value of the weight.
MERGE_RATE = 1.65e13
"""Multiply-adds per second of the kernel that merges adapters."""
# Fitted to the same runs. Predictions for both expert matrices together are within 8% at ranks 8
# and 32.
MERGE_OVERHEAD = {"bf16": 15, "mxfp4": 17}
"""Further time per value by number format of the base, in multiply-adds.

It covers loads, unpacking, scaling, adding the update and rounding.
"""
# In every layer, all ranks wait for the fullest rank. LAYER_RATE and HALF_SPEED_ROWS were fitted with
# this constant, so it is a part of the fit and does not predict the load of a layer, which varies
# (1.19 and 1.33 in docs/performance/training.md). ``expert_load`` of ``activation_memory`` is the
# load over all layers, for memory.
FITTED_LAYER_LOAD = 1.1
"""Constant of the fit for the tokens of the fullest expert-parallel rank in a layer over the mean."""
# Assumed: PCIe 5 at 80%.
HOST_BANDWIDTH = 50e9
"""Bytes per second between a GPU and host memory, in each direction."""


@dataclass(frozen=True)
class StepTime:
    """Seconds for each part of a training step."""

    arithmetic: float
    """Matrix products of the layers and the output layer."""
    experts: float
    """All-to-all of tokens to experts and back, which does not overlap with other work."""
    tensor: float
    """All-gather and reduce-scatter of activations among tensor-parallel ranks."""
    bubble: float
    """Idle time of pipeline stages before the first and after the last micro-batch."""
    gradients: float
    """Reduction of gradients that the last micro-batch's backward pass does not hide."""
    parameters: float
    """All-gather of parameters after the optimizer step.

    The next forward pass hides it if no weights are sent to engines.
    """
    optimizer: float
    """Optimizer kernels, and transfers of offloaded state."""
    merging: float = 0.0
    """Merging of adapters or rounding of weights, before the forward and the backward pass."""
    adapters: float = 0.0
    """Gradients of the adapters' factors, and sums of products of unmerged experts."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(astuple(self))


def predict_step(
    model: ModelConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    lengths: Sequence[int],
    micro_batches: int,
    adapter: AdapterConfig | None = None,
    quantization: Quantization | None = None,
    starts: Sequence[int] = (),
) -> StepTime:
    """Predict the time of a bf16 training step on H200 GPUs.

    Assumptions:

    - Attention hides the messages of context parallelism.
    - Ranks fill nodes in Megatron's order, so groups of up to GPUS_PER_NODE ranks stay in a node.
    - Rounding of experts is bound by memory bandwidth.

    Args:
        model: architecture.
        parallel: layout.
        optimizer: dtypes of gradients and moments, and offloading.
        lengths: tokens of each sequence in a micro-batch, before context parallelism splits it. With
            ``starts``: see ``forward_flops``.
        micro_batches: micro-batches of each data-parallel rank.
        adapter: trained adapters; None if all parameters are trained.
        quantization: format of the experts, or with an adapter of their frozen base; None for bf16.
        starts: see ``forward_flops``.
    """
    # Ranks that divide a micro-batch and its arithmetic among them.
    sharers = parallel.tensor * parallel.context
    stage_seconds = _forward_seconds(model, parallel, lengths, starts)
    slowest = max(stage_seconds)
    passes = _forward_passes(model, lengths, starts, adapter)
    arithmetic = micro_batches * passes * slowest / sharers

    # Exchanges are not hidden. The stage with the most layers has the most exchanges.
    layers = max(parallel.layers_of_stage(stage, model) for stage in range(parallel.pipeline))
    local_tokens = (sum(lengths) - sum(starts)) / sharers
    layer_passes = micro_batches * layers
    experts = layer_passes * _expert_exchange_seconds(model, parallel, local_tokens)
    tensor = layer_passes * _tensor_exchange_seconds(model, parallel, local_tokens)

    # The slowest stage waits while the first and the last micro-batch are in the other stages.
    other_stages = passes * (sum(stage_seconds) - slowest) / sharers
    other_exchanges = (experts + tensor) * (parallel.pipeline - 1) / micro_batches
    bubble = (other_stages + other_exchanges) / parallel.virtual_pipeline

    # The backward pass of the last micro-batch takes all of its time except the forward pass.
    last_backward = arithmetic * (1 - 1 / passes) / micro_batches
    trained = trained_parameters_per_gpu(model, parallel, adapter)
    return StepTime(
        arithmetic=arithmetic,
        experts=experts,
        tensor=tensor,
        bubble=bubble,
        gradients=_exposed_reduction_seconds(parallel, trained, optimizer, last_backward),
        parameters=_data_parallel_seconds(parallel, trained, 2),
        optimizer=_optimizer_seconds(parallel, trained, optimizer),
        merging=layer_passes * _weight_preparation_seconds(model, parallel, adapter, quantization),
        adapters=layer_passes * _factor_seconds(model, parallel, adapter, local_tokens),
    )


def predict_scoring(
    model: ModelConfig,
    parallel: ParallelConfig,
    lengths: Sequence[int],
    micro_batches: int,
) -> float:
    """Predict the seconds of a forward pass of a frozen model, at the rates of ``predict_step``.

    Args:
        model: architecture.
        parallel: layout of the model.
        lengths: tokens of each sequence in a micro-batch.
        micro_batches: micro-batches of each data-parallel rank.
    """
    sharers = parallel.tensor * parallel.context
    stage_seconds = _forward_seconds(model, parallel, lengths, ())
    slowest = max(stage_seconds)
    layers = max(parallel.layers_of_stage(stage, model) for stage in range(parallel.pipeline))
    local_tokens = sum(lengths) / sharers
    # The other half of the exchanges belongs to backward passes.
    exchanges = 0.5 * layers * _tensor_exchange_seconds(model, parallel, local_tokens)
    if model.num_experts:
        exchanges += 0.5 * layers * _expert_exchange_seconds(model, parallel, local_tokens)
    bubble = (sum(stage_seconds) - slowest) / sharers + exchanges * (parallel.pipeline - 1)
    per_micro_batch = slowest / sharers + exchanges
    return micro_batches * per_micro_batch + bubble / parallel.virtual_pipeline


def _forward_passes(
    model: ModelConfig,
    lengths: Sequence[int],
    starts: Sequence[int],
    adapter: AdapterConfig | None,
) -> float:
    """Return the work of a step in forward passes: 3, or less if weights need no gradients."""
    step = training_flops(model, lengths, starts, frozen_base=adapter is not None)
    return step / forward_flops(model, lengths, starts)


def _forward_seconds(
    model: ModelConfig,
    parallel: ParallelConfig,
    lengths: Sequence[int],
    starts: Sequence[int],
) -> list[float]:
    """Return the seconds of each pipeline stage's forward pass of a micro-batch on a single GPU."""
    tokens = sum(lengths) - sum(starts)
    output_layer = 2 * model.hidden_size * model.vocab_size * tokens
    layer = (forward_flops(model, lengths, starts) - output_layer) / model.num_layers

    rows = _rows_per_mlp(model, parallel, tokens)
    # A product of few rows does not reach the full rate. At HALF_SPEED_ROWS it reaches half.
    rate = LAYER_RATE * rows / (rows + HALF_SPEED_ROWS)

    seconds = []
    for stage in range(parallel.pipeline):
        stage_seconds = layer * parallel.layers_of_stage(stage, model) / rate
        if stage == parallel.pipeline - 1:
            stage_seconds += output_layer / OUTPUT_LAYER_RATE
        seconds.append(stage_seconds)
    return seconds


def _rows_per_mlp(model: ModelConfig, parallel: ParallelConfig, tokens: int) -> float:
    """Return the rows of an expert's product in a micro-batch."""
    # A dense MLP processes all tokens. Tensor parallelism splits its columns instead of its rows.
    if not model.num_experts:
        return tokens / parallel.context
    local_tokens = tokens / (parallel.tensor * parallel.context)
    return local_tokens * model.experts_per_token * parallel.expert / model.num_experts


def _expert_exchange_seconds(
    model: ModelConfig,
    parallel: ParallelConfig,
    local_tokens: float,
) -> float:
    """Return the seconds of all-to-all exchanges in one layer and micro-batch."""
    # There are 4: dispatch and combine, forward and backward. The fullest rank takes longest.
    activation_bytes = 2 * local_tokens * model.hidden_size
    routed_bytes = 4 * activation_bytes * model.experts_per_token * FITTED_LAYER_LOAD
    return _message_seconds(routed_bytes, ranks=parallel.expert, span=parallel.expert)


def _tensor_exchange_seconds(
    model: ModelConfig,
    parallel: ParallelConfig,
    local_tokens: float,
) -> float:
    """Return the seconds of all-gather and reduce-scatter of one layer and micro-batch."""
    # There are 8: before and after attention and MLP, forward and backward.
    activation_bytes = 2 * local_tokens * model.hidden_size
    # ``local_tokens`` are those of one rank, but the tokens of all ranks are exchanged.
    return _message_seconds(
        8 * activation_bytes * parallel.tensor,
        ranks=parallel.tensor,
        span=parallel.tensor,
    )


def _weight_preparation_seconds(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig | None,
    quantization: Quantization | None,
) -> float:
    """Return the seconds for merging or rounding the weights of one layer, per micro-batch."""
    if adapter is not None:
        return _merging_seconds(model, parallel, adapter, quantization)
    if quantization is not None:
        return _rounding_seconds(model, parallel)
    return 0.0


def _merging_seconds(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig,
    quantization: Quantization | None,
) -> float:
    """Return the seconds for merging the weights of one layer on a rank, per micro-batch."""
    hidden = model.hidden_size
    targets = set(adapter.targets)
    seconds = 0.0

    # Q, K and V are one fused matrix. The rank of its update is the sum of the adapters' ranks.
    fused_rank = adapter.rank * len(targets & {"q", "k", "v"})
    if fused_rank:
        fused = hidden * (model.query_size + 2 * model.key_size) / parallel.tensor
        seconds += _merge_seconds(fused, fused_rank, "bf16")
    if "o" in targets:
        projection = hidden * model.query_size / parallel.tensor
        seconds += _merge_seconds(projection, adapter.rank, "bf16")

    # The same kernel dequantizes MXFP4 experts, with or without adapters. Unmerged experts are only dequantized.
    merges = adapter.merge_experts and "experts" in targets
    expert_rank = adapter.rank_of_experts(model) if merges else 0
    if expert_rank or quantization is not None:
        experts = model.num_experts / parallel.expert
        # Gate, up and down: three matrices of [intermediate, hidden].
        matrices = experts * 3 * model.intermediate_size * hidden
        seconds += _merge_seconds(matrices, expert_rank, quantization or "bf16")
    # Weights are merged for the forward pass and again for the backward pass.
    return 2 * seconds


def _merge_seconds(values: float, rank: int, base: str) -> float:
    """Return the seconds for merging an update into a weight once.

    Args:
        values: elements in the weight.
        rank: rank of the update.
        base: number format of the weight, "bf16" or "mxfp4".
    """
    base_bytes = MXFP4_BYTES if base == "mxfp4" else 2
    moving = values * (base_bytes + 2) / MEMORY_BANDWIDTH
    computing = values * (rank + MERGE_OVERHEAD[base]) / MERGE_RATE
    return max(moving, computing)


def _factor_seconds(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig | None,
    local_tokens: float,
) -> float:
    """Return the seconds for narrow products with A and B of one layer, per micro-batch."""
    # dB = dY^T (x A^T) and dA = (dY B)^T x are narrow products. They take the time to read x
    # twice and dY twice.
    if adapter is None:
        return 0.0
    targets = set(adapter.targets)
    width = 0.0
    if {"q", "k", "v"} & targets:
        width += model.hidden_size + (model.query_size + 2 * model.key_size) / parallel.tensor
    if "o" in targets:
        width += model.query_size / parallel.tensor + model.hidden_size
    # Here each rank of a tensor-parallel group has all tokens of the group and a part of the heads.
    values = parallel.tensor * local_tokens * width

    if "experts" in targets:
        load = FITTED_LAYER_LOAD if parallel.expert > 1 else 1.0
        rows = local_tokens * model.experts_per_token * load
        values += rows * (2 * model.hidden_size + 3 * model.intermediate_size)
        if not adapter.merge_experts:
            # The forward pass copies each input to append columns. In the backward pass, the update of each input's
            # gradient is written, and read by the product with the base.
            values += 2 * rows * (model.hidden_size + model.intermediate_size)
            # The forward pass and its recomputation copy the matrices to append columns.
            experts = model.num_experts / parallel.expert
            values += 2 * experts * 3 * model.hidden_size * model.intermediate_size
    return 2 * 2 * values / MEMORY_BANDWIDTH


def _rounding_seconds(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the seconds for rounding the experts of one layer on a rank, per micro-batch."""
    experts = model.num_experts / parallel.expert
    values = experts * 3 * model.hidden_size * model.intermediate_size
    # Weights are read and written for the forward pass and again for the backward pass.
    return 2 * values * (2 + 2) / MEMORY_BANDWIDTH


def _data_parallel_seconds(
    parallel: ParallelConfig,
    trained: tuple[float, float],
    bytes_per_parameter: float,
) -> float:
    """Return the seconds of a reduce-scatter or all-gather of trained parameters.

    Args:
        parallel: layout.
        trained: trained (dense, expert) parameters of a rank.
        bytes_per_parameter: size of an element.
    """
    dense, expert = trained
    dense_replicas, expert_replicas = _replicas(parallel)
    # Megatron numbers tensor- and context-parallel ranks first, so copies of a parameter are spread
    # over the whole stage.
    span = parallel.world_size // parallel.pipeline
    dense_bytes = bytes_per_parameter * dense
    expert_bytes = bytes_per_parameter * expert
    return _message_seconds(dense_bytes, ranks=dense_replicas, span=span) + _message_seconds(
        expert_bytes, ranks=expert_replicas, span=span
    )


def _exposed_reduction_seconds(
    parallel: ParallelConfig,
    trained: tuple[float, float],
    optimizer: OptimizerConfig,
    last_backward: float,
) -> float:
    """Return the seconds of the gradients' reduction that do not overlap with computation.

    Args:
        parallel: layout.
        trained: trained (dense, expert) parameters of a rank.
        optimizer: dtype of gradients.
        last_backward: seconds of the last micro-batch's backward pass, which hides the reduction.
    """
    reduction = _data_parallel_seconds(
        parallel, trained, bytes_per_number(optimizer.gradient_dtype)
    )
    return max(0.0, reduction - last_backward)


def _optimizer_seconds(
    parallel: ParallelConfig,
    trained: tuple[float, float],
    optimizer: OptimizerConfig,
) -> float:
    """Return the seconds of an optimizer step."""
    gradient_bytes = bytes_per_number(optimizer.gradient_dtype)
    moment_bytes = 2 * bytes_per_number(optimizer.moment_dtype)

    # Weights, the lower halves of master weights and moments are read and written. Gradients are
    # checked, accumulated, clipped, used and zeroed.
    touched = 2 * (2 + 2 + moment_bytes) + 6 * gradient_bytes
    offloaded = 2 * optimizer.offload_fraction * (2 + moment_bytes)
    seconds_per_parameter = touched / MEMORY_BANDWIDTH + offloaded / HOST_BANDWIDTH

    dense, expert = trained
    dense_replicas, expert_replicas = _replicas(parallel)
    return seconds_per_parameter * (dense / dense_replicas + expert / expert_replicas)


def _replicas(parallel: ParallelConfig) -> tuple[int, int]:
    """Return how many copies a dense and an expert parameter have."""
    dense = parallel.world_size // (parallel.tensor * parallel.pipeline)
    expert = parallel.world_size // (parallel.expert * parallel.pipeline)
    return dense, expert


def _message_seconds(size: float, ranks: int, span: int) -> float:
    """Return the seconds of an exchange among ranks.

    Args:
        size: bytes that each rank sends, divided evenly among all ranks.
        ranks: number of ranks in the exchange.
        span: number of consecutive ranks over which they are spread.
    """
    # Number of ranks on the sender's node, including the sender.
    near = max(1, ranks * GPUS_PER_NODE // max(span, GPUS_PER_NODE))
    within_node = (near - 1) / NODE_BANDWIDTH
    beyond_node = (ranks - near) / NETWORK_BANDWIDTH
    # NVLink and the network send at the same time.
    return size / ranks * max(within_node, beyond_node)
