"""Time of a training step, predicted from the configuration alone."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_gptoss.config import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_gptoss.planning.flops import forward_flops
from megatron_gptoss.planning.memory import EXPERT_LOAD, parameters_per_gpu

GPUS_PER_NODE = 8
ARITHMETIC = 520e12
"""Operations per second of the layers, forward and backward, where every expert gets many rows. With this and the next
three ``predict_step`` is within 10 % of runs of 16k tokens to a micro-batch, tensor parallel ones excepted."""
OUTPUT_LAYER = 458e12
"""The same of the output layer, which makes its logits twice; measured (docs/performance.md, log-probs)."""
HALF_SPEED_ROWS = 1150
"""Rows of one expert in a micro-batch at which its products, and with them the step, run half as fast."""
NODE_BANDWIDTH = 180e9
"""Bytes per second that a GPU gets through in the all-to-all of experts within a node, as measured under NVLink."""
NETWORK_BANDWIDTH = 40e9
"""Bytes per second of one GPU to other nodes: a 400 Gb/s adapter each, at 80 %. Assumed, not measured."""
MEMORY_BANDWIDTH = 2.8e12
"""Bytes per second that the optimizer reads and writes: 77 ms of its kernels for 214 GB, profiled on an H200."""
HOST_BANDWIDTH = 50e9
"""Bytes per second between a GPU and host memory, each way: PCIe 5 at 80 %. Assumed, not measured."""


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
