"""Memory of one GPU in bf16 training, predicted from the configuration alone: for ``gptoss plan`` and for layouts that
nobody has run yet. docs/performance.md compares it with what was measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

from megatron_gptoss.config import ModelConfig, ParallelConfig
from megatron_gptoss.log_probs import CHUNK_COLUMNS, CHUNK_TOKENS
from megatron_gptoss.planning.memory_inputs import MemoryInputs

EXPERT_LOAD = 1.1
"""Tokens that the fullest expert-parallel rank gets, relative to the mean, where nothing balances the router."""


class Memory(NamedTuple):
    """Bytes of the fullest pipeline stage, of all models together."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept from the forward for the backward pass, of all micro-batches in flight."""
    working: float
    """The larger of the log-probs' blocks and what one layer's backward pass needs besides."""
    fetched: float
    """Optimizer state that comes from host memory for the step and finds no room where the last two were."""

    @property
    def total(self) -> float:
        return sum(self)


def parameters_per_gpu(model: ModelConfig, parallel: ParallelConfig, stage: int = 0) -> tuple[float, float]:
    """(dense, expert) parameters of one rank of a pipeline stage."""
    layers = parallel.layers_of_stage(stage, model)
    queries = model.num_attention_heads * model.head_size
    keys = model.num_key_value_heads * model.head_size
    hidden, inner = model.hidden_size, model.intermediate_size
    attention = (hidden + 1) * (queries + 2 * keys) / parallel.tensor + (queries / parallel.tensor + 1) * hidden
    dense = layers * (attention + model.num_attention_heads + 2 * hidden + (hidden + 1) * model.num_experts)
    vocabulary = model.vocab_size * hidden / parallel.tensor
    dense += vocabulary * (stage == 0) + (vocabulary + hidden) * (stage == parallel.pipeline - 1)
    expert = (hidden + 1) * 2 * inner + (inner + 1) * hidden
    return dense, layers * model.num_experts / parallel.expert * expert


def activation_bytes(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Bytes per token and layer that the forward pass keeps, for tokens as they are spread over context and tensor."""
    queries = model.num_attention_heads * model.head_size
    keys = model.num_key_value_heads * model.head_size
    hidden, inner = model.hidden_size, model.intermediate_size
    if "moe" in parallel.recompute:
        experts = 0.0
    else:
        routed = hidden + 2 * inner + (0 if "moe_act" in parallel.recompute else inner)
        experts = model.experts_per_token * routed * EXPERT_LOAD
        experts += 0 if "layernorm" in parallel.recompute else hidden
    # residual twice, normed input; rotated queries and keys, values inside the whole projection, output, statistics
    attention = 3 * hidden + (queries + keys + (queries + 4 * keys) / 2 + queries + 2 * model.num_attention_heads)
    return 2 * (attention + experts)


def predict(training: MemoryInputs, stage: int = 0) -> Memory:
    """What the GPUs of one pipeline stage hold."""
    model, parallel, optimizer, tokens = training.model, training.parallel, training.optimizer, training.tokens
    beside = training.auxiliary_models
    dense, expert = parameters_per_gpu(model, parallel, stage)
    shards = parallel.world_size // (parallel.tensor * parallel.pipeline)
    expert_shards = parallel.world_size // (parallel.pipeline * parallel.expert)
    local = tokens / (parallel.context * parallel.tensor)
    in_flight: float = parallel.pipeline - stage
    if (chunks := parallel.virtual_pipeline) > 1:  # as Megatron's interleaved schedule warms up, and one more
        in_flight = (2 * (in_flight - 1) + (chunks - 1) * parallel.pipeline + 1) / chunks
    in_flight = min(in_flight, training.micro_batches)
    block = min(CHUNK_TOKENS, tokens / parallel.context) * CHUNK_COLUMNS
    vocabulary = model.vocab_size / parallel.tensor * model.hidden_size
    is_last = stage == parallel.pipeline - 1
    head = max(8 * block, 2 * vocabulary) + 6 * local * model.hidden_size
    routed = model.hidden_size + 4 * model.intermediate_size
    layer = 2 * local * model.experts_per_token * EXPERT_LOAD * routed
    layers = parallel.layers_of_stage(stage, model)
    again = layers if parallel.recompute_layers is None else min(layers, chunks * parallel.recompute_layers)
    kept = (layers - again) * activation_bytes(model, parallel.model_copy(update={"recompute": ()}))
    activations = in_flight * local * (again * activation_bytes(model, parallel) + kept)
    working = max(head if is_last else 0, layer)
    weights, gradients, resident, fetched = 2 * (dense + expert) * (1 + len(beside)), 0.0, 0.0, 0.0
    for adam in (optimizer, *filter(None, beside)):
        own = dense
        if adam is not optimizer and is_last:  # a critic has no vocabulary to predict
            own -= vocabulary
            weights -= 2 * vocabulary
        gradients += (2 if adam.gradient_dtype == "bf16" else 4) * (own + expert)
        # 16 bits that complete the bf16 weights to fp32, and two moments
        state = (2 + 2 * (2 if adam.moment_dtype == "bf16" else 4)) * (own / shards + expert / expert_shards)
        resident += (1 - adam.offload) * state
        fetched = max(fetched, adam.offload * state - activations - working)
    return Memory(weights, gradients, resident, activations, working, fetched)


def worst_stage(training: MemoryInputs) -> Memory:
    """The prediction for the pipeline stage that needs most."""
    return max((predict(training, stage) for stage in range(training.parallel.pipeline)), key=lambda m: m.total)


def fits(training: MemoryInputs, memory: Memory, gigabytes: float) -> bool:
    """While the trainer works, and while servers on its GPUs do, beside weights, gradients and optimizer."""
    return max(memory.total, sum(memory[:3]) + training.engine_share * gigabytes * 1e9) <= gigabytes * 1e9


def describe_layout(layout: ParallelConfig, configured: ParallelConfig) -> str:
    """The sizes of a layout and, where it is not as configured, what else must be set for it."""
    text = layout.sizes
    for name in ("virtual_pipeline", "last_stage_layers"):
        value = getattr(layout, name)
        if value != getattr(configured, name):
            text += f", {name} {'null' if value is None else value}"
    return text


def layouts_that_fit(training: MemoryInputs, gigabytes: float) -> list[tuple[ParallelConfig, Memory]]:
    """Layouts of as many GPUs whose prediction stays within ``gigabytes``, the simplest first, with the other settings
    as they are. Simple: little tensor, pipeline and context parallelism, experts over as few ranks as fit."""
    found = []
    powers = (1, 2, 4, 8)
    for tensor, pipeline, context, expert in product(powers, powers, powers, (*powers, 16, 32, 64)):
        sizes: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
        sizes["virtual_pipeline"] = training.parallel.virtual_pipeline if pipeline > 1 else 1
        sizes["last_stage_layers"] = None
        layout = training.parallel.model_copy(update=sizes)
        try:
            layout.check_layout(training.model)
        except ValueError:
            continue
        if training.sequences < layout.data * training.mini_batches:
            continue
        memory = worst_stage(replace(training, parallel=layout).with_sequences(training.sequences))
        if fits(training, memory, gigabytes):
            found.append((tensor * pipeline * context, tensor, pipeline, expert, layout, memory))
    return [(layout, memory) for *_, layout, memory in sorted(found, key=lambda entry: entry[:4])]


def smaller_settings(training: MemoryInputs) -> list[tuple[str, Memory]]:
    """Settings that take less memory than these, the cheapest in time first, each on top of those before it."""
    found, recompute = [], training.parallel.recompute
    thrifty = dict.fromkeys((*recompute, *(() if "moe" in recompute else ("moe_act", "layernorm"))))
    half = max(training.longest_sequence, training.tokens // 2)
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("parallel.recompute_layers=null", "parallel", {"recompute_layers": None}),
        (f"parallel.recompute=[{','.join(thrifty)}]", "parallel", {"recompute": tuple(thrifty)}),
        ("optimizer.moment_dtype=bf16", "optimizer", {"moment_dtype": "bf16"}),
        (f"training.max_tokens_per_micro_batch={half}", "tokens", {"tokens": half}),
        ("optimizer.gradient_dtype=bf16", "optimizer", {"gradient_dtype": "bf16"}),
        ("optimizer.offload=1", "optimizer", {"offload": 1.0}),
    ]
    for text, part, update in changes:
        before, old = training, getattr(training, part)
        training = replace(training, **({part: old.model_copy(update=update)} if part != "tokens" else update))
        if training != before:
            training = training.with_sequences(training.sequences)
            found.append((text, worst_stage(training)))
    return found


def memory_plan(training: MemoryInputs, gigabytes: float) -> str:
    """What training takes of each GPU, which layouts of as many GPUs of ``gigabytes`` fit, and what would take less."""
    memory, gpus = worst_stage(training), training.parallel.world_size
    fit = "" if fits(training, memory, gigabytes) else f", more than the {gigabytes:g} GB of the GPU"
    lines = [
        f"memory per GPU, in bf16, {training.tokens} tokens per micro-batch"
        + "".join(", with the critic" if adam else ", with the reference policy" for adam in training.auxiliary_models)
        + f": {memory.total / 1e9:.1f} GB"
        + (
            f"; {sum(memory[:3]) / 1e9:.1f} GB while servers have {training.engine_share:.0%}"
            if training.engine_share
            else ""
        )
        + fit,
        *(f"  {part:12}{size / 1e9:8.1f} GB" for part, size in memory._asdict().items()),
    ]
    fitting = layouts_that_fit(training, gigabytes)
    if fitting:
        lines.append(f"simplest layouts of {gpus} GPUs that fit:")
    else:
        part, size = max(memory._asdict().items(), key=lambda entry: entry[1])
        lines.append(f"no layout of {gpus} GPUs fits; most goes to the {part} ({size / 1e9:.1f} GB)")
    for layout, needed in fitting[:5]:
        lines.append(f"  {describe_layout(layout, training.parallel)}: {needed.total / 1e9:.1f} GB")
    lines.append("to take less, one after the other:")
    for text, needed in smaller_settings(training):
        lines.append(f"  {text}: {needed.total / 1e9:.1f} GB")
    return "\n".join([*lines, "  more GPUs"])


@contextmanager
def out_of_memory_explained(training: MemoryInputs) -> Iterator[None]:
    """An OutOfMemoryError from inside also says what was predicted and what to set next."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        total = torch.cuda.mem_get_info()[1] / 1e9 if torch.cuda.is_available() else 0.0
        message = f"{str(error).splitlines()[0]}\n{memory_plan(training, total)}"
        raise torch.OutOfMemoryError(message) from error
