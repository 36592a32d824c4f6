"""How much arithmetic a training step is, and how much the GPU can do: behind every TFLOP/s and MFU reported."""

import functools
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import torch

from megatron_gptoss.config import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_gptoss.memory import EXPERT_LOAD, parameters_per_gpu

GPUS_PER_NODE = 8
ARITHMETIC = 520e12
"""Operations per second of the layers, forward and backward, where every expert gets many rows. With this and the next
three ``predict_step`` is within 10 % of runs of 16k tokens to a micro-batch, tensor parallel ones excepted."""
OUTPUT_LAYER = 458e12
"""The same of the output layer, which makes its logits twice; measured (docs/performance.md, log-probs)."""
HALF_SPEED_ROWS = 1150
"""Rows of one expert in a micro-batch at which its products, and with them the step, run half as fast."""
MATMUL_CEILING = 780e12
"""Of a large bf16 matrix product on an H200, as ``matmul_ceiling`` measures it: what MFU is a share of."""
NODE_BANDWIDTH = 180e9
"""Bytes per second that a GPU gets through in the all-to-all of experts within a node, as measured under NVLink."""
NETWORK_BANDWIDTH = 40e9
"""Bytes per second of one GPU to other nodes: a 400 Gb/s adapter each, at 80 %. Assumed, not measured."""
MEMORY_BANDWIDTH = 2.8e12
"""Bytes per second that the optimizer reads and writes: 77 ms of its kernels for 214 GB, profiled on an H200."""
HOST_BANDWIDTH = 50e9
"""Bytes per second between a GPU and host memory, each way: PCIe 5 at 80 %. Assumed, not measured."""


def attended_pairs(length: int, window: int | None = None) -> int:
    """(query, key) pairs of one causal sequence; with a window each query sees that many keys, itself included."""
    full = min(length, window or length)
    return full * (full + 1) // 2 + (length - full) * full


def forward_flops(model: ModelConfig, lengths: Iterable[int]) -> int:
    """Floating-point operations of a forward pass over packed sequences: 2 per multiply-add of every matrix product.

    Counted: attention projections, query-key and probability-value products of the pairs that causality and window
    leave, router, the chosen experts, output layer. Not counted: norms, softmax, activations, embedding look-up, and
    anything that is computed again. Training is three times this."""
    lengths = list(lengths)
    queries = model.num_attention_heads * model.head_size
    keys = model.num_key_value_heads * model.head_size
    per_token = model.num_layers * (
        model.hidden_size * (2 * queries + 2 * keys)
        + model.hidden_size * model.num_experts
        + model.experts_per_token * 3 * model.hidden_size * model.intermediate_size
    )
    per_token += model.hidden_size * model.vocab_size
    windows = [model.sliding_window if kind == "sliding_attention" else None for kind in model.layer_types]
    pairs = sum(attended_pairs(length, window) for window in windows for length in lengths)
    return 2 * per_token * sum(lengths) + 4 * queries * pairs


class StepTime(NamedTuple):
    """Seconds of a training step; ``predict_step`` says what is in them."""

    arithmetic: float
    experts: float
    """All-to-all of tokens to experts and back, which nothing overlaps."""
    tensor: float
    """All-gather and reduce-scatter of activations among tensor-parallel ranks."""
    bubble: float
    """Pipeline stages that wait for the first and the last micro-batch."""
    gradients: float
    """What the backward pass of the last micro-batch does not hide of their reduction."""
    parameters: float
    """Gathering them after the optimizer's step. Where no weights are sent then, the next forward pass hides it."""
    optimizer: float
    """Its arithmetic, and the way of offloaded state from host memory and back."""

    @property
    def total(self) -> float:
        return sum(self)


def predict_step(
    model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, lengths: Sequence[int], micro_batches: int
) -> StepTime:
    """Time of a bf16 training step on H200s, for layouts that nobody has run yet.

    ``lengths``: of the sequences in one micro-batch, before context parallelism shares them out; ``micro_batches``: of
    each data-parallel rank. Context parallelism is counted as free: its messages hide behind attention. Ranks are taken
    to fill nodes in Megatron's order, so groups of up to GPUS_PER_NODE ranks stay within one."""
    stages = parallel.pipeline
    layers = max(parallel.layers_of_stage(stage, model) for stage in range(stages))
    head = 2 * model.hidden_size * model.vocab_size * sum(lengths)
    body = (forward_flops(model, lengths) - head) / model.num_layers
    sharers = parallel.tensor * parallel.context
    local = sum(lengths) / sharers
    rows_of_expert = local * model.experts_per_token * parallel.expert / model.num_experts
    rate = ARITHMETIC * rows_of_expert / (rows_of_expert + HALF_SPEED_ROWS)
    of_stages = [
        body * parallel.layers_of_stage(stage, model) / rate + (stage == stages - 1) * head / OUTPUT_LAYER
        for stage in range(stages)
    ]
    arithmetic = micro_batches * 3 * max(of_stages) / sharers

    def seconds(size: float, ranks: int, span: int) -> float:
        """Of sending ``size`` bytes from each of ``ranks`` ranks, spread over ``span`` consecutive ones, to all."""
        near = max(1, ranks * GPUS_PER_NODE // max(span, GPUS_PER_NODE))  # ranks on the sender's node, itself included
        within, beyond = (near - 1) / NODE_BANDWIDTH, (ranks - near) / NETWORK_BANDWIDTH
        return size / ranks * max(within, beyond)

    rows = 2 * local * model.hidden_size  # bytes
    # dispatch and combine, each forward and backward; the fullest rank decides
    routed = 4 * rows * model.experts_per_token * EXPERT_LOAD
    experts = micro_batches * layers * seconds(routed, parallel.expert, parallel.expert)
    # around attention and around the experts, forward and backward
    tensor = micro_batches * layers * seconds(8 * rows * parallel.tensor, parallel.tensor, parallel.tensor)
    # while one micro-batch is with the other stages, the slowest waits
    others = 3 * (sum(of_stages) - max(of_stages)) / sharers + (experts + tensor) * (stages - 1) / micro_batches
    bubble = others / parallel.virtual_pipeline
    dense, expert = parameters_per_gpu(model, parallel)
    replicas = parallel.world_size // (parallel.tensor * stages)
    expert_replicas = parallel.world_size // (parallel.expert * stages)
    spread = parallel.world_size // stages

    def reduction(bytes_per_parameter: float) -> float:
        return seconds(bytes_per_parameter * dense, replicas, spread) + seconds(
            bytes_per_parameter * expert, expert_replicas, spread
        )

    gradient_bytes = 2 if optimizer.gradient_dtype == "bf16" else 4
    moments = 2 if optimizer.moment_dtype == "bf16" else 4
    # weights, their other 16 bits and moments, to and fro; gradients are checked, summed, clipped, used and zeroed
    touched = 2 * (2 + 2 + 2 * moments) + 6 * gradient_bytes
    offloaded = 2 * optimizer.offload * (2 + 2 * moments)
    return StepTime(
        arithmetic,
        experts,
        tensor,
        bubble,
        gradients=max(0.0, reduction(gradient_bytes) - arithmetic * 2 / 3 / micro_batches),
        parameters=reduction(2),
        optimizer=(touched / MEMORY_BANDWIDTH + offloaded / HOST_BANDWIDTH)
        * (dense / replicas + expert / expert_replicas),
    )


@functools.cache
def matmul_ceiling(size: int = 8192, rounds: int = 10) -> float:
    """TFLOP/s of a bf16 product of two random size x size matrices on the current GPU, measured once (0.05 s)."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(rounds + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * size**3 / median(times[2:]) / 1e9
