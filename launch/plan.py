"""What ``gptoss plan`` prints, computed from the configuration alone."""

from dataclasses import asdict, dataclass
from itertools import accumulate

from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.context_parallel import (
    AttentionShape,
    ContextLayout,
    Machine,
    balanced_layout,
    candidates,
)
from megatron_gptoss.context_parallel.cost_model import SchemeCost
from megatron_gptoss.planning.flops import MATMUL_CEILING, forward_flops
from megatron_gptoss.planning.memory_advice import describe_layout, layouts_that_fit
from megatron_gptoss.planning.step_time import StepTime, predict_step
from rl_loop.config.run import RlConfig, RunConfig

LAYOUTS_SHOWN = 5
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def full_row(config: RunConfig) -> list[int]:
    """Return the sequence lengths of a micro-batch that is full of longest episodes."""
    limit = config.training.max_tokens_per_micro_batch
    longest = config.rollout.max_tokens
    lengths = [longest] * (limit // longest)
    if limit % longest:
        lengths.append(limit % longest)
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


def predict_update(config: RunConfig, parallel: ParallelConfig) -> UpdatePrediction:
    """Predict an update on H200s in which every episode is as long as it may be."""
    lengths = full_row(config)
    rollout = config.rollout
    episodes = 1
    if isinstance(config, RlConfig):
        episodes = rollout.tasks_per_step * rollout.samples_per_task

    # Rounded up to what the pipeline's schedule can divide.
    multiple = parallel.micro_batch_multiple
    tokens_per_multiple = sum(lengths) * parallel.data * multiple
    micro_batches = multiple * max(1, -(-episodes * rollout.max_tokens // tokens_per_multiple))

    step = predict_step(config.model, parallel, config.optimizer, lengths, micro_batches)
    gpu_seconds = step.total * parallel.world_size
    tokens = sum(lengths) * micro_batches * parallel.data
    # The backward pass computes two products for each of the forward pass.
    flops = 3 * forward_flops(config.model, lengths) * micro_batches * parallel.data
    return UpdatePrediction(
        micro_batches=micro_batches,
        tokens=tokens,
        step=step,
        tokens_per_second=tokens / gpu_seconds,
        mfu=flops / gpu_seconds / MATMUL_CEILING,
    )


def step_plan(config: RunConfig, gigabytes: float) -> str:
    """Describe the time of one update as configured, and with the fastest layouts of as many GPUs.

    ``gigabytes`` is the memory of a GPU that training may use."""
    configured = predict_update(config, config.parallel)
    # Parts that would be shown as 0.00 are left out.
    seconds = asdict(configured.step)
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005)
    lines = [
        f"an update on H200s, {configured.tokens} tokens in {configured.micro_batches} micro-batches per "
        f"data-parallel rank: {configured} ({parts})",
        "the fastest layouts that fit, as predicted:",
    ]

    fitting = [
        (predict_update(config, layout), layout, memory)
        for layout, memory in layouts_that_fit(config.memory_inputs, gigabytes)
    ]
    fitting.sort(key=lambda entry: entry[0].step.total)
    for update, layout, memory in fitting[:LAYOUTS_SHOWN]:
        lines.append(
            f"  {describe_layout(layout, config.parallel)}: {memory.total / 1e9:.1f} GB, {update}",
        )
    return "\n".join(lines)


def attention_plan(config: RunConfig) -> str:
    """Describe what each context-parallel scheme would send and cost, for every kind of layer.

    The row is full of longest episodes. At run time the same model chooses for every row, from its
    real lengths."""
    parallel = config.parallel
    if parallel.context == 1:
        return "context parallelism: none (parallel.context is 1); every rank attends to whole rows by itself"

    layout = _padded_layout(config)
    limit = config.training.max_tokens_per_micro_batch
    sequences = len(layout.offsets) - 1
    lines = [
        f"context parallelism over {parallel.context} ranks: {limit} tokens in {sequences} sequences, "
        f"{layout.tokens_per_rank} tokens per rank, {max(layout.shared)} of them of sequences that ranks share",
        f"one layer, forward and backward, at {parallel.context_bandwidth:g} GB/s and "
        f"{parallel.attention_tflops:g} TFLOP/s:",
        f"  {'layers':22}{'scheme':12}{'sent MB':>10}{'communication ms':>18}{'computation ms':>16}{'together ms':>13}",
    ]
    lines += _scheme_lines(config, layout, kind="full_attention")
    lines += _scheme_lines(config, layout, kind="sliding_attention")
    return "\n".join(lines)


def _padded_layout(config: RunConfig) -> ContextLayout:
    """Return how context-parallel ranks share a full row, padded like a real one."""
    parallel = config.parallel
    lengths = full_row(config)
    padding = -config.training.max_tokens_per_micro_batch % (parallel.context * parallel.tensor)
    if padding:
        lengths.append(padding)
    return balanced_layout((0, *accumulate(lengths)), parallel.context)


def _scheme_lines(config: RunConfig, layout: ContextLayout, kind: str) -> list[str]:
    """Return a line for each scheme that layers of ``kind``, as in layer_types, could use."""
    model = config.model
    parallel = config.parallel
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
        ELEMENT_BYTES[config.dtype],
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
