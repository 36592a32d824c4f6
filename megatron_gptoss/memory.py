"""Memory of one GPU in bf16 training, predicted from the configuration alone: for ``gptoss plan`` and for layouts that
nobody has run yet. docs/performance.md compares it with what was measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any

import torch

from megatron_gptoss.config import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_gptoss.log_probs import CHUNK_COLUMNS, CHUNK_TOKENS

EXPERT_LOAD = 1.1
"""Tokens that the fullest expert-parallel rank gets, relative to the mean, where nothing balances the router."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest pipeline stage."""

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
        return sum(getattr(self, field.name) for field in fields(self))


def parameters_per_gpu(model: ModelConfig, parallel: ParallelConfig, stage: int = 0) -> tuple[float, float]:
    """(dense, expert) parameters of one rank of a pipeline stage."""
    layers = model.num_layers // parallel.pipeline
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


def predict(
    model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, tokens: int, stage: int = 0
) -> Memory:
    """``tokens``: of one micro-batch before context parallelism shares them out."""
    dense, expert = parameters_per_gpu(model, parallel, stage)
    shards = parallel.world_size // (parallel.tensor * parallel.pipeline)
    expert_shards = parallel.world_size // (parallel.pipeline * parallel.expert)
    # 16 bits that complete the bf16 weights to fp32, and two moments
    state = 2 + 2 * (2 if optimizer.moment_dtype == "bf16" else 4)
    local = tokens / (parallel.context * parallel.tensor)
    in_flight: float = parallel.pipeline - stage
    if (chunks := parallel.virtual_pipeline) > 1:  # as Megatron's interleaved schedule warms up, and one more
        in_flight = (2 * (in_flight - 1) + (chunks - 1) * parallel.pipeline + 1) / chunks
    block = min(CHUNK_TOKENS, tokens / parallel.context) * CHUNK_COLUMNS
    vocabulary = model.vocab_size / parallel.tensor * model.hidden_size
    head = max(8 * block, 2 * vocabulary) + 6 * local * model.hidden_size
    routed = model.hidden_size + 4 * model.intermediate_size
    layer = 2 * local * model.experts_per_token * EXPERT_LOAD * routed
    activations = in_flight * model.num_layers / parallel.pipeline * local * activation_bytes(model, parallel)
    working = max(head if stage == parallel.pipeline - 1 else 0, layer)
    adam = state * (dense / shards + expert / expert_shards)
    return Memory(
        weights=2 * (dense + expert),
        gradients=(2 if optimizer.gradient_dtype == "bf16" else 4) * (dense + expert),
        optimizer=(1 - optimizer.offload) * adam,
        activations=activations,
        working=working,
        fetched=max(0.0, optimizer.offload * adam - activations - working),
    )


def worst_stage(model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, tokens: int) -> Memory:
    """The prediction for the pipeline stage that needs most."""
    stages = range(parallel.pipeline)
    return max((predict(model, parallel, optimizer, tokens, stage) for stage in stages), key=lambda m: m.total)


def layouts_that_fit(
    model: ModelConfig, gpus: int, optimizer: OptimizerConfig, tokens: int, gigabytes: float, base: ParallelConfig
) -> list[tuple[ParallelConfig, Memory]]:
    """Layouts of ``gpus`` GPUs whose prediction stays within ``gigabytes``, the simplest first; ``base`` gives the
    rest of the settings. Simple: little tensor, pipeline and context parallelism, experts over as few ranks as fit."""
    found = []
    powers = (1, 2, 4, 8)
    for tensor, pipeline, context, expert in product(powers, powers, powers, (*powers, 16, 32, 64)):
        sizes = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
        sizes["virtual_pipeline"] = base.virtual_pipeline if pipeline > 1 else 1
        layout = base.model_copy(update={"world_size": gpus, **sizes})
        try:
            layout.check_layout(model)
        except ValueError:
            continue
        memory = worst_stage(model, layout, optimizer, tokens)
        if memory.total <= gigabytes * 1e9:
            found.append((tensor * pipeline * context, tensor, pipeline, expert, layout, memory))
    return [(layout, memory) for *_, layout, memory in sorted(found, key=lambda entry: entry[:4])]


def smaller_settings(
    model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, tokens: int
) -> list[tuple[str, Memory]]:
    """Settings that take less memory than these, the cheapest in time first, each on top of those before it."""
    found = []
    thrifty = dict.fromkeys((*parallel.recompute, *(() if "moe" in parallel.recompute else ("moe_act", "layernorm"))))
    half = max(1, tokens // 2)
    changes: list[tuple[str, dict[str, Any], dict[str, Any], int]] = [
        (f"parallel.recompute=[{','.join(thrifty)}]", {"recompute": tuple(thrifty)}, {}, tokens),
        ("optimizer.moment_dtype=bf16", {}, {"moment_dtype": "bf16"}, tokens),
        (f"training.max_tokens_per_micro_batch={half}", {}, {}, half),
        ("optimizer.gradient_dtype=bf16", {}, {"gradient_dtype": "bf16"}, half),
        ("optimizer.offload=1", {}, {"offload": 1.0}, half),
    ]
    for text, layout, adam, limit in changes:
        before = parallel, optimizer, tokens
        parallel, optimizer = parallel.model_copy(update=layout), optimizer.model_copy(update=adam)
        tokens = limit
        if (parallel, optimizer, tokens) != before:
            found.append((text, worst_stage(model, parallel, optimizer, tokens)))
    return found


def memory_plan(
    model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, tokens: int, gigabytes: float
) -> str:
    """What training takes of each GPU, which layouts of as many GPUs of ``gigabytes`` fit, and what would take less."""
    memory = worst_stage(model, parallel, optimizer, tokens)
    fits = memory.total <= gigabytes * 1e9
    lines = [
        f"memory per GPU, in bf16, {tokens} tokens per micro-batch: {memory.total / 1e9:.1f} GB"
        + ("" if fits else f", more than the {gigabytes:g} GB of the GPU"),
        *(f"  {part:12}{size / 1e9:8.1f} GB" for part, size in asdict(memory).items()),
    ]
    fitting = layouts_that_fit(model, parallel.world_size, optimizer, tokens, gigabytes, parallel)
    if fitting:
        lines.append(f"simplest layouts of {parallel.world_size} GPUs that fit:")
    else:
        part, size = max(asdict(memory).items(), key=lambda entry: entry[1])
        lines.append(f"no layout of {parallel.world_size} GPUs fits; most goes to the {part} ({size / 1e9:.1f} GB)")
    for layout, needed in fitting[:5]:
        sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in ("tensor", "pipeline", "context", "expert"))
        lines.append(f"  {sizes}: {needed.total / 1e9:.1f} GB")
    lines.append("to take less, one after the other:")
    for text, needed in smaller_settings(model, parallel, optimizer, tokens):
        lines.append(f"  {text}: {needed.total / 1e9:.1f} GB")
    return "\n".join([*lines, "  more GPUs"])


@contextmanager
def out_of_memory_explained(
    model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, tokens: int
) -> Iterator[None]:
    """An OutOfMemoryError from inside also says what was predicted and what to set next."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        total = torch.cuda.mem_get_info()[1] / 1e9 if torch.cuda.is_available() else 0.0
        plan = memory_plan(model, parallel, optimizer, tokens, total)
        raise torch.OutOfMemoryError(f"{str(error).splitlines()[0]}\n{plan}") from error
