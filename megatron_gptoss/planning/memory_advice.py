"""Which layouts and settings fit the memory of a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product

import torch

from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.planning.memory import Memory, fits, worst_stage
from megatron_gptoss.planning.memory_inputs import MemoryInputs


def layouts_that_fit(
    inputs: MemoryInputs,
    gigabytes: float,
) -> list[tuple[ParallelConfig, Memory]]:
    """Return the layouts of as many GPUs that stay within ``gigabytes``, the simplest first.

    All other settings stay as they are.
    """
    fitting = []
    for layout in _possible_layouts(inputs):
        memory = worst_stage(replace(inputs, parallel=layout).with_sequences(inputs.sequences))
        if fits(inputs, memory, gigabytes):
            fitting.append((layout, memory))
    return sorted(fitting, key=lambda entry: _complexity(entry[0]))


def _complexity(layout: ParallelConfig) -> tuple[int, ...]:
    """Rank layouts: little model parallelism, experts over as few ranks as possible."""
    sharers = layout.tensor * layout.pipeline * layout.context
    return sharers, layout.tensor, layout.pipeline, layout.expert


def _possible_layouts(inputs: MemoryInputs) -> Iterator[ParallelConfig]:
    """Yield the layouts of powers of two that the model allows and the sequences fill."""
    powers = (1, 2, 4, 8)
    for tensor, pipeline, context in product(powers, powers, powers):
        for expert in (*powers, 16, 32, 64):
            layout = inputs.parallel.model_copy(
                update={
                    "tensor": tensor,
                    "pipeline": pipeline,
                    "context": context,
                    "expert": expert,
                    "virtual_pipeline": inputs.parallel.virtual_pipeline if pipeline > 1 else 1,
                    # It fits one pipeline size only.
                    "last_stage_layers": None,
                }
            )
            # Most combinations split something unevenly.
            try:
                layout.check_layout(inputs.model)
            except ValueError:
                continue
            if inputs.sequences >= layout.data * inputs.mini_batches:
                yield layout


def smaller_settings(inputs: MemoryInputs) -> list[tuple[str, Memory]]:
    """Return settings that take less memory, each on top of those before it.

    The cheapest in time come first. Each is an override as the user writes it, and the prediction.
    """
    suggestions = []
    previous = inputs
    for override, changed in _successive_changes(inputs):
        if changed != previous:
            memory = worst_stage(changed.with_sequences(inputs.sequences))
            suggestions.append((override, memory))
        previous = changed
    return suggestions


def _successive_changes(inputs: MemoryInputs) -> Iterator[tuple[str, MemoryInputs]]:
    inputs = _change_parallel(inputs, recompute_layers=None)
    yield "parallel.recompute_layers=null", inputs

    # "moe" recomputes all of the experts; the other two only matter without it.
    recompute = inputs.parallel.recompute
    if "moe" not in recompute:
        recompute = tuple(dict.fromkeys((*recompute, "moe_act", "layernorm")))
    inputs = _change_parallel(inputs, recompute=recompute)
    yield f"parallel.recompute=[{','.join(recompute)}]", inputs

    inputs = _change_optimizer(inputs, moment_dtype="bf16")
    yield "optimizer.moment_dtype=bf16", inputs

    # No shorter than the longest episode, or the configuration would not validate.
    half = max(inputs.longest_sequence, inputs.tokens // 2)
    inputs = replace(inputs, tokens=half)
    yield f"training.max_tokens_per_micro_batch={half}", inputs

    inputs = _change_optimizer(inputs, gradient_dtype="bf16")
    yield "optimizer.gradient_dtype=bf16", inputs

    inputs = _change_optimizer(inputs, offload=1.0)
    yield "optimizer.offload=1", inputs


def _change_parallel(inputs: MemoryInputs, **update: object) -> MemoryInputs:
    return replace(inputs, parallel=inputs.parallel.model_copy(update=update))


def _change_optimizer(inputs: MemoryInputs, **update: object) -> MemoryInputs:
    return replace(inputs, optimizer=inputs.optimizer.model_copy(update=update))


def memory_plan(inputs: MemoryInputs, gigabytes: float) -> str:
    """Say what training takes of each GPU, which layouts fit, and what would take less."""
    memory = worst_stage(inputs)
    lines = [_summary(inputs, memory, gigabytes)]
    for name, size in asdict(memory).items():
        lines.append(f"  {name:12}{size / 1e9:8.1f} GB")

    gpus = inputs.parallel.world_size
    fitting = layouts_that_fit(inputs, gigabytes)
    if fitting:
        lines.append(f"simplest layouts of {gpus} GPUs that fit:")
    else:
        name, size = max(asdict(memory).items(), key=lambda item: item[1])
        lines.append(
            f"no layout of {gpus} GPUs fits; most goes to the {name} ({size / 1e9:.1f} GB)"
        )
    for layout, needed in fitting[:5]:
        description = describe_layout(layout, inputs.parallel)
        lines.append(f"  {description}: {needed.total / 1e9:.1f} GB")

    lines.append("to take less, one after the other:")
    for override, needed in smaller_settings(inputs):
        lines.append(f"  {override}: {needed.total / 1e9:.1f} GB")
    lines.append("  more GPUs")
    return "\n".join(lines)


def _summary(inputs: MemoryInputs, memory: Memory, gigabytes: float) -> str:
    text = f"memory per GPU, in bf16, {inputs.tokens} tokens per micro-batch"
    for optimizer in inputs.auxiliary_models:
        text += ", with the critic" if optimizer else ", with the reference policy"

    text += f": {memory.total / 1e9:.1f} GB"
    if inputs.engine:
        share = f"{inputs.engine.awake_fraction:.0%}"
        text += f"; {memory.resting / 1e9:.1f} GB while servers have {share}"
    if not fits(inputs, memory, gigabytes):
        text += f", more than the {gigabytes:g} GB of the GPU"
    return text


def describe_layout(layout: ParallelConfig, configured: ParallelConfig) -> str:
    """Return the sizes of a layout and, where it is not as configured, what else must be set."""
    text = layout.sizes
    for name in ("virtual_pipeline", "last_stage_layers"):
        value = getattr(layout, name)
        if value != getattr(configured, name):
            text += f", {name} {'null' if value is None else value}"
    return text


@contextmanager
def out_of_memory_explained(inputs: MemoryInputs) -> Iterator[None]:
    """Add to an OutOfMemoryError from inside what was predicted and what to set next."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The advice needs the GPU's size; without a GPU nothing fits.
        gigabytes = 0.0
        if torch.cuda.is_available():
            _, total = torch.cuda.mem_get_info()
            gigabytes = total / 1e9
        first_line = str(error).splitlines()[0]
        message = f"{first_line}\n{memory_plan(inputs, gigabytes)}"
        raise torch.OutOfMemoryError(message) from error
