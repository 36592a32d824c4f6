"""Time of a training step on H200s, predicted from the configuration alone.

docs/performance.md compares it with what was measured.
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
from megatron_gptoss.planning.flops import forward_flops, training_flops
from megatron_gptoss.planning.parameter_counts import (
    MXFP4_BYTES,
    bytes_of,
    trained_parameters_per_gpu,
)

GPUS_PER_NODE = 8
ARITHMETIC = 520e12
"""FLOP/s of the layers, forward and backward, where every expert gets many rows. With this and the
next three ``predict_step`` is within 10 % of runs of 16k tokens to a micro-batch, tensor parallel
ones excepted."""
OUTPUT_LAYER = 458e12
"""The same of the output layer, which makes its logits twice; measured (docs/performance.md,
log-probs)."""
HALF_SPEED_ROWS = 1150
"""Rows of one expert in a micro-batch at which its products, and with them the step, run half as
fast."""
NODE_BANDWIDTH = 180e9
"""Bytes per second that a GPU gets through in the all-to-all of experts within a node, as measured
under NVLink."""
NETWORK_BANDWIDTH = 40e9
"""Bytes per second of one GPU to other nodes: a 400 Gb/s adapter each, at 80 %. Assumed, not
measured."""
MEMORY_BANDWIDTH = 2.8e12
"""Bytes per second that the optimizer reads and writes: 77 ms of its kernels for 214 GB, profiled
on an H200."""
MERGE_RATE = 1.65e13
"""Multiply-adds per second of the kernel that merges adapters: each rank is one for every value of
a weight. From merging ranks of 0, 8 and 32 into the experts of one layer of the 20B on an H200."""
MERGE_OVERHEAD = {"bf16": 15, "mxfp4": 17}
"""What else the kernel does for a value, in the time of so many multiply-adds: waiting for memory,
unpacking the base, with the steps of an MXFP4 code, scaling and adding the update, rounding. From
the same runs: both matrices of the experts together, at ranks 8 and 32, are predicted within 8 %."""
EXPERT_LOAD = 1.1
"""Tokens that the fullest expert-parallel rank gets in a layer, relative to the mean; ARITHMETIC and
what follows it were fitted with it. Not what a rank keeps of all layers (``expert_load`` of
``activation_memory``): the fullest rank of every layer is waited for."""
HOST_BANDWIDTH = 50e9
"""Bytes per second between a GPU and host memory, each way: PCIe 5 at 80 %. Assumed, not
measured."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step; ``predict_step`` says what is in them."""

    arithmetic: float
    experts: float
    """All-to-all of tokens to experts and back, which nothing overlaps."""
    tensor: float
    """All-gather and reduce-scatter of activations among tensor-parallel ranks."""
    bubble: float
    """Pipeline stages that wait for the first and the last micro-batch."""
    gradients: float
    """Reducing them, as far as the backward pass of the last micro-batch does not hide it."""
    parameters: float
    """Gathering them after the optimizer's step. Where no weights are sent then, the next forward
    pass hides it."""
    optimizer: float
    """Its arithmetic, and moving offloaded state from host memory and back."""
    merging: float = 0.0
    """With adapters: making merged weights, with quantization: rounded ones, for the forward and
    again for the backward pass."""
    adapters: float = 0.0
    """The gradients of their factors."""

    @property
    def total(self) -> float:
        return sum(astuple(self))


def predict_step(
    model: ModelConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    lengths: Sequence[int],
    micro_batches: int,
    adapter: AdapterConfig | None = None,
    quantization: Quantization | None = None,
) -> StepTime:
    """Predict the time of a bf16 training step on H200s, for layouts that nobody has run yet.

    Context parallelism is counted as free: its messages hide behind attention. Ranks are taken to
    fill nodes in Megatron's order, so groups of up to GPUS_PER_NODE ranks stay within one. Rounding
    experts is taken to be bound by memory, which was not measured.

    Args:
        model: the architecture.
        parallel: the layout.
        optimizer: for the dtypes of gradients and moments, and offloading.
        lengths: of the sequences in one micro-batch, before context parallelism shares them out.
        micro_batches: of each data-parallel rank.
        adapter: what is trained of it; None for all parameters.
        quantization: what experts are trained through; None for their weights as they are.
    """
    # Ranks that share a micro-batch: its arithmetic is divided among them.
    sharers = parallel.tensor * parallel.context
    stage_seconds = _forward_seconds(model, parallel, lengths)
    slowest = max(stage_seconds)
    passes = _forward_passes(model, lengths, adapter)
    arithmetic = micro_batches * passes * slowest / sharers

    # Exchanges are not hidden; the stage with most layers has most of them.
    layers = max(parallel.layers_of_stage(stage, model) for stage in range(parallel.pipeline))
    local_tokens = sum(lengths) / sharers
    layer_passes = micro_batches * layers
    experts = layer_passes * _expert_exchange_seconds(model, parallel, local_tokens)
    tensor = layer_passes * _tensor_exchange_seconds(model, parallel, local_tokens)

    # While one micro-batch is with the other stages, the slowest waits.
    other_stages = passes * (sum(stage_seconds) - slowest) / sharers
    other_exchanges = (experts + tensor) * (parallel.pipeline - 1) / micro_batches
    bubble = (other_stages + other_exchanges) / parallel.virtual_pipeline

    # Gradients are reduced under the backward pass of the last micro-batch, all but a forward
    # pass of its time.
    gradient_bytes = bytes_of(optimizer.gradient_dtype)
    trained = trained_parameters_per_gpu(model, parallel, adapter)
    reduction = _data_parallel_seconds(parallel, trained, gradient_bytes)
    hidden = arithmetic * (1 - 1 / passes) / micro_batches

    return StepTime(
        arithmetic=arithmetic,
        experts=experts,
        tensor=tensor,
        bubble=bubble,
        gradients=max(0.0, reduction - hidden),
        parameters=_data_parallel_seconds(parallel, trained, 2),
        optimizer=_optimizer_seconds(parallel, trained, optimizer),
        merging=layer_passes * _weight_making_seconds(model, parallel, adapter, quantization),
        adapters=layer_passes * _factor_gradient_seconds(model, parallel, adapter, local_tokens),
    )


def _forward_passes(
    model: ModelConfig,
    lengths: Sequence[int],
    adapter: AdapterConfig | None,
) -> float:
    """Return the work of a step in forward passes: three, fewer if weights need no gradients."""
    step = training_flops(model, lengths, frozen_base=adapter is not None)
    return step / forward_flops(model, lengths)


def _forward_seconds(
    model: ModelConfig,
    parallel: ParallelConfig,
    lengths: Sequence[int],
) -> list[float]:
    """Return each pipeline stage's forward pass of one micro-batch, if one GPU had all of it."""
    output_layer = 2 * model.hidden_size * model.vocab_size * sum(lengths)
    layer = (forward_flops(model, lengths) - output_layer) / model.num_layers

    rows = _rows_per_mlp(model, parallel, sum(lengths))
    # A product of few rows does not reach the GPU's rate: at HALF_SPEED_ROWS it has half of it.
    rate = ARITHMETIC * rows / (rows + HALF_SPEED_ROWS)

    seconds = []
    for stage in range(parallel.pipeline):
        stage_seconds = layer * parallel.layers_of_stage(stage, model) / rate
        if stage == parallel.pipeline - 1:
            stage_seconds += output_layer / OUTPUT_LAYER
        seconds.append(stage_seconds)
    return seconds


def _rows_per_mlp(model: ModelConfig, parallel: ParallelConfig, tokens: int) -> float:
    """Return how many rows of a micro-batch an expert's product has: few do not fill the GPU.

    The one MLP of a dense layer has all of them, of which tensor parallelism splits the columns.
    """
    if not model.num_experts:
        return tokens / parallel.context
    local_tokens = tokens / (parallel.tensor * parallel.context)
    return local_tokens * model.experts_per_token * parallel.expert / model.num_experts


def _expert_exchange_seconds(
    model: ModelConfig,
    parallel: ParallelConfig,
    local_tokens: float,
) -> float:
    """Return the all-to-all of one layer and micro-batch.

    There are four: dispatch and combine, forward and backward. The fullest rank decides.
    """
    activation_bytes = 2 * local_tokens * model.hidden_size
    routed_bytes = 4 * activation_bytes * model.experts_per_token * EXPERT_LOAD
    return _message_seconds(routed_bytes, ranks=parallel.expert, span=parallel.expert)


def _tensor_exchange_seconds(
    model: ModelConfig,
    parallel: ParallelConfig,
    local_tokens: float,
) -> float:
    """Return the gathering and scattering of one layer and micro-batch.

    There are eight: around attention and around the experts, forward and backward.
    """
    activation_bytes = 2 * local_tokens * model.hidden_size
    # ``local_tokens`` are a rank's share; what is gathered and scattered is the whole of them.
    return _message_seconds(
        8 * activation_bytes * parallel.tensor,
        ranks=parallel.tensor,
        span=parallel.tensor,
    )


def _weight_making_seconds(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig | None,
    quantization: Quantization | None,
) -> float:
    """Return the time of one layer and micro-batch in which weights are made that are not those
    which are held: merged or rounded ones."""
    if adapter is not None:
        return _merging_seconds(model, parallel, adapter)
    if quantization is not None:
        return _rounding_seconds(model, parallel)
    return 0.0


def _merging_seconds(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig,
) -> float:
    """Return the time of one layer and micro-batch in which a rank's merged weights are made, for
    the forward and again for the backward pass."""
    hidden = model.hidden_size
    targets = set(adapter.targets)
    seconds = 0.0

    # Queries, keys and values are one matrix, whose update has the ranks of all their adapters.
    fused_rank = adapter.rank * len(targets & {"q", "k", "v"})
    if fused_rank:
        fused = hidden * (model.query_size + 2 * model.key_size) / parallel.tensor
        seconds += _merge_seconds(fused, fused_rank, "bf16")
    if "o" in targets:
        projection = hidden * model.query_size / parallel.tensor
        seconds += _merge_seconds(projection, adapter.rank, "bf16")

    # Experts in four bits are dequantised by the same kernel, whether they have adapters or not.
    expert_rank = adapter.rank_of_experts(model) if "experts" in targets else 0
    if expert_rank or parallel.base == "mxfp4":
        experts = model.num_experts / parallel.expert
        # Gate, up and down: three matrices of [intermediate, hidden].
        matrices = experts * 3 * model.intermediate_size * hidden
        seconds += _merge_seconds(matrices, expert_rank, parallel.base)
    return 2 * seconds


def _merge_seconds(values: float, rank: int, base: str) -> float:
    """Return the time of merging updates of some rank into so many values, once."""
    base_bytes = MXFP4_BYTES if base == "mxfp4" else 2
    moving = values * (base_bytes + 2) / MEMORY_BANDWIDTH
    computing = values * (rank + MERGE_OVERHEAD[base]) / MERGE_RATE
    return max(moving, computing)


def _factor_gradient_seconds(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig | None,
    local_tokens: float,
) -> float:
    """Return the time of one layer and micro-batch in which the gradients of A and B are made.

    dB = dY^T (x A^T) and dA = (dY B)^T x are narrow, bound by reading x twice and dY twice.
    """
    if adapter is None:
        return 0.0
    targets = set(adapter.targets)
    width = 0.0
    if {"q", "k", "v"} & targets:
        width += model.hidden_size + (model.query_size + 2 * model.key_size) / parallel.tensor
    if "o" in targets:
        width += model.query_size / parallel.tensor + model.hidden_size
    # Ranks of a tensor-parallel group have all tokens here, and their share of the heads.
    values = parallel.tensor * local_tokens * width

    if "experts" in targets:
        load = EXPERT_LOAD if parallel.expert > 1 else 1.0
        rows = local_tokens * model.experts_per_token * load
        values += rows * (2 * model.hidden_size + 3 * model.intermediate_size)
    return 2 * 2 * values / MEMORY_BANDWIDTH


def _rounding_seconds(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the time of one layer and micro-batch in which a rank's experts are read and written
    as rounded bf16 weights, for the forward and again for the backward pass."""
    experts = model.num_experts / parallel.expert
    values = experts * 3 * model.hidden_size * model.intermediate_size
    return 2 * values * (2 + 2) / MEMORY_BANDWIDTH


def _data_parallel_seconds(
    parallel: ParallelConfig,
    trained: tuple[float, float],
    bytes_per_parameter: float,
) -> float:
    """Return the reduction or the gathering over their replicas of what is trained, (dense, expert)
    parameters of a rank."""
    dense, expert = trained
    dense_replicas, expert_replicas = _replicas(parallel)
    span = parallel.world_size // parallel.pipeline
    dense_bytes = bytes_per_parameter * dense
    expert_bytes = bytes_per_parameter * expert
    return _message_seconds(dense_bytes, ranks=dense_replicas, span=span) + _message_seconds(
        expert_bytes, ranks=expert_replicas, span=span
    )


def _optimizer_seconds(
    parallel: ParallelConfig,
    trained: tuple[float, float],
    optimizer: OptimizerConfig,
) -> float:
    gradient_bytes = bytes_of(optimizer.gradient_dtype)
    moment_bytes = 2 * bytes_of(optimizer.moment_dtype)

    # Weights, their other 16 bits and moments are read and written; gradients are checked, summed,
    # clipped, used and zeroed.
    touched = 2 * (2 + 2 + moment_bytes) + 6 * gradient_bytes
    offloaded = 2 * optimizer.offload * (2 + moment_bytes)
    seconds_per_parameter = touched / MEMORY_BANDWIDTH + offloaded / HOST_BANDWIDTH

    dense, expert = trained
    dense_replicas, expert_replicas = _replicas(parallel)
    return seconds_per_parameter * (dense / dense_replicas + expert / expert_replicas)


def _replicas(parallel: ParallelConfig) -> tuple[int, int]:
    """Return over how many ranks a dense and an expert parameter are replicated."""
    dense = parallel.world_size // (parallel.tensor * parallel.pipeline)
    expert = parallel.world_size // (parallel.expert * parallel.pipeline)
    return dense, expert


def _message_seconds(size: float, ranks: int, span: int) -> float:
    """Return the time of sending ``size`` bytes from each of some ranks to all of them.

    Args:
        size: bytes of one rank, shared out evenly among the receivers.
        ranks: how many take part.
        span: over how many consecutive ranks they are spread.
    """
    # Those on the sender's node, itself included.
    near = max(1, ranks * GPUS_PER_NODE // max(span, GPUS_PER_NODE))
    within_node = (near - 1) / NODE_BANDWIDTH
    beyond_node = (ranks - near) / NETWORK_BANDWIDTH
    return size / ranks * max(within_node, beyond_node)
