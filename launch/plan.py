"""What ``gptoss plan`` prints, computed from the configuration alone."""

import math
from dataclasses import asdict, dataclass, replace
from itertools import accumulate

from megatron_gptoss.context_parallel import (
    AttentionShape,
    ContextLayout,
    Machine,
    balanced_layout,
    candidates,
)
from megatron_gptoss.context_parallel.cost_model import SchemeCost
from megatron_gptoss.planning.flops import MATMUL_CEILING, training_flops
from megatron_gptoss.planning.memory_advice import Hardware, describe_layout, layouts_that_fit
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.step_time import StepTime, predict_step

LAYOUTS_SHOWN = 5
MEASURED_GPU = "H200"
"""The GPU of all rates that times are predicted from, here and in ``rollout_plan``."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def full_row(inputs: MemoryInputs) -> list[int]:
    """Return the sequence lengths of a micro-batch that is full of longest episodes."""
    longest = inputs.longest_sequence
    lengths = [longest] * (inputs.tokens // longest)
    if inputs.tokens % longest:
        lengths.append(inputs.tokens % longest)
    return lengths


@dataclass(frozen=True)
class UpdatePrediction:
    """Predicted time of one update with a parallel layout."""

    micro_batches: int
    """Per data-parallel rank."""
    tokens: int
    """Of the whole update."""
    step: StepTime
    tokens_per_second: float
    """Per GPU."""
    mfu: float
    """Share of the time in which the GPUs' matrix units could have done the model's arithmetic."""

    def __str__(self) -> str:
        speed = f"{self.tokens_per_second:.0f} tokens/s/GPU"
        return f"{self.step.total:.2f} s, {speed}, {self.mfu:.1%} MFU"


def predict_update(inputs: MemoryInputs) -> UpdatePrediction:
    """Predict an update at the rates of H200s in which every episode is as long as it may be."""
    parallel = inputs.parallel
    lengths = full_row(inputs)
    # Supervised runs do not bound the sequences of a step here: one fills the fewest micro-batches.
    episodes = 1 if math.isinf(inputs.sequences) else int(inputs.sequences)

    # Rounded up to what the pipeline's schedule can divide.
    multiple = parallel.micro_batch_multiple
    tokens_per_multiple = sum(lengths) * parallel.data * multiple
    micro_batches = multiple * max(1, -(-episodes * inputs.longest_sequence // tokens_per_multiple))

    step = predict_step(
        inputs.model,
        parallel,
        inputs.optimizer,
        lengths,
        micro_batches,
        adapter=inputs.adapter,
        quantization=inputs.quantization,
    )
    gpu_seconds = step.total * parallel.world_size
    tokens = sum(lengths) * micro_batches * parallel.data
    frozen_base = inputs.adapter is not None
    flops = training_flops(inputs.model, lengths, frozen_base=frozen_base)
    flops *= micro_batches * parallel.data
    return UpdatePrediction(
        micro_batches=micro_batches,
        tokens=tokens,
        step=step,
        tokens_per_second=tokens / gpu_seconds,
        mfu=flops / gpu_seconds / MATMUL_CEILING,
    )


def speed_notes(hardware: Hardware) -> list[str]:
    """Say that times are of another GPU than the one a plan is made for; nothing if they are not."""
    if MEASURED_GPU in hardware.gpu:
        return []
    return [
        f"times are those of {MEASURED_GPU}s, whose rates were measured; memory is that of the GPU planned for "
        f"({hardware.gpu}, {hardware.gigabytes:g} GB)"
    ]


def step_plan(inputs: MemoryInputs, gigabytes: float) -> str:
    """Describe the time of one update as configured, and with the fastest layouts of as many GPUs.

    ``gigabytes`` is the memory of a GPU, in units of 1e9 bytes."""
    configured = predict_update(inputs)
    # Parts that would be shown as 0.00 are left out.
    seconds = asdict(configured.step)
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005)
    lines = [
        f"an update at the rates of {MEASURED_GPU}s, {configured.tokens} tokens in "
        f"{configured.micro_batches} micro-batches per data-parallel rank: {configured} ({parts})",
        "the fastest layouts that fit, as predicted:",
    ]

    fitting = [
        (predict_update(replace(inputs, parallel=layout)), layout, account)
        for layout, account in layouts_that_fit(inputs, gigabytes)
    ]
    fitting.sort(key=lambda entry: entry[0].step.total)
    for update, layout, account in fitting[:LAYOUTS_SHOWN]:
        needed = account.peak.total / 1e9
        lines.append(f"  {describe_layout(layout, inputs.parallel)}: {needed:.1f} GB, {update}")
    return "\n".join(lines)


def attention_plan(inputs: MemoryInputs, dtype: str) -> str:
    """Describe what each context-parallel scheme would send and cost, for every kind of layer.

    The row is full of longest episodes, in float32 or bfloat16 (``dtype``). At run time the same
    model chooses for every row, from its real lengths."""
    parallel = inputs.parallel
    if parallel.context == 1:
        return "context parallelism: none (parallel.context is 1); every rank attends to whole rows by itself"

    layout = _padded_layout(inputs)
    sequences = len(layout.offsets) - 1
    lines = [
        f"context parallelism over {parallel.context} ranks: {inputs.tokens} tokens in {sequences} sequences, "
        f"{layout.tokens_per_rank} tokens per rank, {max(layout.shared)} of them of sequences that ranks share",
        f"one layer, forward and backward, at {parallel.context_bandwidth:g} GB/s and "
        f"{parallel.attention_tflops:g} TFLOP/s:",
        f"  {'layers':22}{'scheme':12}{'sent MB':>10}{'communication ms':>18}{'computation ms':>16}{'together ms':>13}",
    ]
    lines += _scheme_lines(inputs, dtype, layout, kind="full_attention")
    lines += _scheme_lines(inputs, dtype, layout, kind="sliding_attention")
    return "\n".join(lines)


def _padded_layout(inputs: MemoryInputs) -> ContextLayout:
    """Return how context-parallel ranks share a full row, padded like a real one."""
    parallel = inputs.parallel
    lengths = full_row(inputs)
    padding = -inputs.tokens % (parallel.context * parallel.tensor)
    if padding:
        lengths.append(padding)
    return balanced_layout((0, *accumulate(lengths)), parallel.context)


def _scheme_lines(inputs: MemoryInputs, dtype: str, layout: ContextLayout, kind: str) -> list[str]:
    """Return a line for each scheme that layers of ``kind``, as in layer_types, could use."""
    model = inputs.model
    parallel = inputs.parallel
    window: int | None = None
    configured: str = parallel.context_scheme_full
    if kind == "sliding_attention":
        window = model.sliding_window
        configured = parallel.context_scheme_window

    # Heads are split by tensor parallelism before context parallelism sees them.
    shape = AttentionShape(
        model.num_attention_heads // parallel.tensor,
        model.num_key_value_heads // parallel.tensor,
        model.head_size,
        ELEMENT_BYTES[dtype],
    )
    machine = Machine(parallel.context_bandwidth * 1e9, parallel.attention_tflops * 1e12)
    costs = candidates(layout, shape, window, machine)  # the best comes first
    chosen = costs[0].scheme if configured == "auto" else configured

    lines = []
    for cost in costs:
        line = f"  {model.layer_types.count(kind):3} {kind:18}{_cost_columns(cost)}"
        if cost.scheme == chosen:
            line += "  <- taken"
            if configured != "auto":
                line += " (set)"
        lines.append(line)
    return lines


def _cost_columns(cost: SchemeCost) -> str:
    return (
        f"{cost.scheme:12}{cost.bytes_sent / 1e6:10.2f}{cost.communication * 1e3:18.3f}"
        f"{cost.computation * 1e3:16.3f}{cost.seconds * 1e3:13.3f}"
    )
