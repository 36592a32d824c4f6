"""What ``gptoss plan`` prints, computed from the configuration alone."""

from dataclasses import asdict
from itertools import accumulate

from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.context_parallel import AttentionShape, Machine, balanced_layout, candidates
from megatron_gptoss.planning.flops import MATMUL_CEILING, forward_flops
from megatron_gptoss.planning.memory_advice import describe_layout, layouts_that_fit
from megatron_gptoss.planning.step_time import StepTime, predict_step
from rl_loop.config.run import RlConfig, RunConfig


def full_row(config: RunConfig) -> list[int]:
    """Lengths of the sequences in a micro-batch that is full of longest episodes."""
    limit, longest = config.training.max_tokens_per_micro_batch, config.rollout.max_tokens
    return [longest] * (limit // longest) + ([limit % longest] if limit % longest else [])


def step_plan(config: RunConfig, gigabytes: float) -> str:
    """Time of one update on H200s if every episode is as long as it may be, as configured and for the fastest layouts
    of as many GPUs of ``gigabytes``."""
    lengths, rollout = full_row(config), config.rollout
    episodes = rollout.tasks_per_step * rollout.samples_per_task if isinstance(config, RlConfig) else 1

    def update(parallel: ParallelConfig) -> tuple[int, StepTime, str]:
        multiple = parallel.micro_batch_multiple
        count = multiple * max(1, -(-episodes * rollout.max_tokens // (sum(lengths) * parallel.data * multiple)))
        step = predict_step(config.model, parallel, config.optimizer, lengths, count)
        gpu_seconds = step.total * parallel.world_size
        mfu = 3 * forward_flops(config.model, lengths) * count * parallel.data / gpu_seconds / MATMUL_CEILING
        speed = sum(lengths) * count * parallel.data / gpu_seconds
        return count, step, f"{step.total:.2f} s, {speed:.0f} tokens/s/GPU, {mfu:.1%} MFU"

    count, step, text = update(config.parallel)
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in asdict(step).items() if seconds >= 0.005)
    tokens = sum(lengths) * count * config.parallel.data
    lines = [
        f"an update on H200s, {tokens} tokens in {count} micro-batches per data-parallel rank: {text} ({parts})",
        "the fastest layouts that fit, as predicted:",
    ]
    fitting = [(update(layout), layout, memory) for layout, memory in layouts_that_fit(config.memory_inputs, gigabytes)]
    for (_, _, text), layout, memory in sorted(fitting, key=lambda entry: entry[0][1].total)[:5]:
        lines.append(f"  {describe_layout(layout, config.parallel)}: {memory.total / 1e9:.1f} GB, {text}")
    return "\n".join(lines)


def attention_plan(config: RunConfig) -> str:
    """Per kind of layer what each context-parallel scheme would send and cost, for a full row of longest episodes. At
    run time the same model chooses for every row, from its real lengths."""
    model, parallel = config.model, config.parallel
    if parallel.context == 1:
        return "context parallelism: none (parallel.context is 1); every rank attends to whole rows by itself"
    limit, lengths = config.training.max_tokens_per_micro_batch, full_row(config)
    align = parallel.context * parallel.tensor
    if padding := -limit % align:
        lengths.append(padding)
    layout = balanced_layout((0, *accumulate(lengths)), parallel.context)
    heads, kv_heads = (n // parallel.tensor for n in (model.num_attention_heads, model.num_key_value_heads))
    shape = AttentionShape(heads, kv_heads, model.head_size, {"float32": 4, "bfloat16": 2}[config.dtype])
    machine = Machine(parallel.context_bandwidth * 1e9, parallel.attention_tflops * 1e12)
    lines = [
        f"context parallelism over {parallel.context} ranks: {limit} tokens in {len(lengths)} sequences, "
        f"{layout.tokens_per_rank} tokens per rank, {max(layout.shared)} of them of sequences that ranks share",
        f"one layer, forward and backward, at {parallel.context_bandwidth:g} GB/s and {parallel.attention_tflops:g} "
        "TFLOP/s:",
        f"  {'layers':22}{'scheme':12}{'sent MB':>10}{'communication ms':>18}{'computation ms':>16}{'together ms':>13}",
    ]
    schemes = {"full_attention": parallel.context_scheme_full, "sliding_attention": parallel.context_scheme_window}
    for kind, wanted in schemes.items():
        found = candidates(layout, shape, model.sliding_window if kind == "sliding_attention" else None, machine)
        chosen = found[0].scheme if wanted == "auto" else wanted
        for cost in found:
            taken = "  <- taken" + ("" if wanted == "auto" else " (set)") if cost.scheme == chosen else ""
            lines.append(
                f"  {model.layer_types.count(kind):3} {kind:18}{cost.scheme:12}{cost.bytes_sent / 1e6:10.2f}"
                f"{cost.communication * 1e3:18.3f}{cost.computation * 1e3:16.3f}{cost.seconds * 1e3:13.3f}{taken}"
            )
    return "\n".join(lines)
