"""Text of ``gptoss plan``: the memory prediction, and layouts and settings that fit."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

from megatron_gptoss.config import ParallelConfig, check_quantization
from megatron_gptoss.planning.memory import MemoryPrediction, predict_fullest_stage
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.state_memory import host_memory_of_save

PREDICTION_TOLERANCE = 0.05
"""Relative accuracy of predictions.

Below this share of free GPU memory, the plan says "fits, but only just" and ``gptoss list`` says
"tight".
"""


@dataclass(frozen=True)
class Hardware:
    """Machine that a plan must fit."""

    gigabytes: float
    """Total memory of one GPU, in units of 1e9 bytes."""
    gpu: str = "GPU"
    """Name of the GPU in the plan."""
    host_gigabytes: float | None = None
    """Host memory of a node, in units of 1e9 bytes; None if unknown."""
    gpus_per_node: int = 8
    """Maximum number of GPUs per node, which share the host memory."""


def layouts_that_fit(
    inputs: MemoryInputs,
    gigabytes: float,
) -> list[tuple[ParallelConfig, MemoryPrediction]]:
    """Return the layouts for the same number of GPUs that fit, simplest first.

    All other settings stay unchanged.

    Args:
        inputs: models, layout and batch.
        gigabytes: memory of a GPU, in units of 1e9 bytes.
    """
    fitting = []
    for layout in _possible_layouts(inputs):
        # The number of micro-batches follows from the data-parallel size, which differs between
        # layouts.
        changed = replace(inputs, parallel=layout).with_sequences(inputs.sequences)
        prediction = predict_fullest_stage(changed, gigabytes)
        if prediction.peak.total <= gigabytes * 1e9:
            fitting.append((layout, prediction))
    return sorted(fitting, key=lambda entry: _complexity(entry[0]))


def _complexity(layout: ParallelConfig) -> tuple[int, ...]:
    """Return a sort key that puts layouts with less model parallelism first.

    Among layouts with equal model parallelism, smaller expert groups come first.
    """
    sharers = layout.tensor * layout.pipeline * layout.context
    return sharers, layout.tensor, layout.pipeline, layout.expert


def _possible_layouts(inputs: MemoryInputs) -> Iterator[ParallelConfig]:
    """Yield all layouts with sizes in powers of 2 that the model and the batch allow."""
    powers = (1, 2, 4, 8)
    expert_sizes = (*powers, 16, 32, 64)
    for tensor, pipeline, context, expert in product(powers, powers, powers, expert_sizes):
        sizes = {
            "tensor": tensor,
            "pipeline": pipeline,
            "context": context,
            "expert": expert,
            "virtual_pipeline": inputs.parallel.virtual_pipeline if pipeline > 1 else 1,
            # The configured value fits only the configured pipeline size.
            "last_stage_layers": None,
        }
        layout = inputs.parallel.model_copy(update=sizes)

        # Most combinations are invalid, for example because they split heads unevenly.
        try:
            layout.check_layout(inputs.model, inputs.adapter, inputs.frozen)
        except ValueError:
            continue
        # With fewer, some data-parallel rank has no sequence in a mini-batch.
        if inputs.sequences >= layout.data * inputs.mini_batches:
            yield layout


def smaller_settings(inputs: MemoryInputs, gigabytes: float) -> list[tuple[str, MemoryPrediction]]:
    """Return settings that need less memory. Each includes all settings before it.

    Args:
        inputs: models, layout and batch.
        gigabytes: memory of a GPU, in units of 1e9 bytes.

    Returns:
        Pairs of a configuration override and the resulting prediction. Settings that cost the least
        time come first.
    """
    # Overrides that change nothing are left out: the configuration has them already.
    suggestions = []
    previous = inputs
    for override, changed in _successive_changes(inputs, gigabytes):
        if changed != previous:
            prediction = predict_fullest_stage(changed.with_sequences(inputs.sequences), gigabytes)
            suggestions.append((override, prediction))
        previous = changed
    return suggestions


def _successive_changes(
    inputs: MemoryInputs,
    gigabytes: float,
) -> Iterator[tuple[str, MemoryInputs]]:
    """Yield each override with the inputs after it and all earlier overrides."""
    inputs = _change_parallel(inputs, recompute_layers=None)
    yield "parallel.recompute_layers=null", inputs

    # "moe" recomputes the experts completely, so the other two have no effect with it.
    recompute = inputs.parallel.recompute
    if inputs.model.num_experts and "moe" not in recompute:
        recompute = tuple(dict.fromkeys((*recompute, "moe_act", "layernorm")))
    inputs = _change_parallel(inputs, recompute=recompute)
    yield f"parallel.recompute=[{','.join(recompute)}]", inputs

    if _base_can_be_mxfp4(inputs):
        inputs = replace(inputs, quantization="mxfp4")
        yield "quantization=mxfp4", inputs

    # Half of the moments' memory, at no cost in time.
    inputs = _change_optimizer(inputs, moment_dtype="bf16")
    yield "optimizer.moment_dtype=bf16", inputs

    # A micro-batch must hold the longest episode, or the configuration is invalid.
    half = max(inputs.longest_sequence, inputs.tokens // 2)
    inputs = replace(inputs, tokens=half)
    yield f"training.max_tokens_per_micro_batch={half}", inputs

    # bf16 gradients lose precision with every micro-batch, so try this after the settings that keep
    # fp32 sums.
    inputs = _change_optimizer(inputs, gradient_dtype="bf16")
    yield "optimizer.gradient_dtype=bf16", inputs

    # Late, because every step then transfers the state over PCIe.
    inputs = _change_optimizer(inputs, offload_fraction=1.0)
    yield "optimizer.offload_fraction=1", inputs

    # Last, because it slows rollouts down: servers get the memory that is left, rounded down to 1%.
    engine = inputs.engine
    if engine is not None and engine.running_fraction > 0:
        running = predict_fullest_stage(inputs, gigabytes)
        # The phases in which the servers have all their memory.
        fullest = max(running.phase(name).total for name in ("first_sync", "rollout")) / 1e9
        room = engine.running_fraction + (gigabytes - fullest) / gigabytes if gigabytes else 0.0
        fraction = math.floor(100 * room) / 100
        if 0 < fraction < engine.running_fraction:
            inputs = replace(inputs, engine=replace(engine, running_fraction=fraction))
            yield f"rollout.engine.memory_fraction={fraction:g}", inputs


def _base_can_be_mxfp4(inputs: MemoryInputs) -> bool:
    """Return True if experts below adapters may be held in MXFP4. Loading checks their values."""
    if inputs.adapter is None:
        return False
    try:
        check_quantization("quantization", "mxfp4", inputs.model)
    except ValueError:
        return False
    return True


def _change_parallel(inputs: MemoryInputs, **update: object) -> MemoryInputs:
    """Return a copy with other fields of ``parallel``."""
    return replace(inputs, parallel=inputs.parallel.model_copy(update=update))


def _change_optimizer(inputs: MemoryInputs, **update: object) -> MemoryInputs:
    """Return a copy with other fields of the optimizer, which a critic shares."""
    changed = replace(inputs, optimizer=inputs.optimizer.model_copy(update=update))
    if not any(inputs.auxiliary_models):
        return changed
    auxiliary = [each and each.model_copy(update=update) for each in inputs.auxiliary_models]
    return replace(changed, auxiliary_models=auxiliary)


def memory_plan(inputs: MemoryInputs, hardware: Hardware) -> str:
    """Return the plan as text.

    It has a verdict, the memory of each phase, layouts that fit, and settings that need less
    memory. 1 GB is 1e9 bytes.

    Args:
        inputs: models, layout and batch.
        hardware: machine that the plan must fit.
    """
    gigabytes = hardware.gigabytes
    prediction = predict_fullest_stage(inputs, gigabytes)
    # The verdict comes first, because many readers need only this line.
    lines = [
        _verdict(inputs, prediction, hardware),
        _summary(inputs, hardware),
        *_phase_table(prediction),
    ]

    parts = asdict(prediction.memory).items()
    in_words = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.1f}" for name, size in parts)
    lines.append(f"tensors of the update, GB: {in_words}")
    if prediction.host:
        lines.append(_host_line(inputs, prediction, hardware))
    lines.append(_save_line(inputs, prediction, hardware))

    gpus = inputs.parallel.world_size
    fitting = layouts_that_fit(inputs, gigabytes)
    if fitting:
        lines.append(f"simplest layouts of the trainer's {gpus} GPUs that fit:")
    else:
        lines.append(f"no layout of the trainer's {gpus} GPUs fits (parallel.world_size={gpus})")
    for layout, needed in fitting[:5]:
        description = describe_layout(layout, inputs.parallel)
        lines.append(f"  {description}: {needed.peak.total / 1e9:.1f} GB")

    lines.append("settings that need less memory, each in addition to those above it:")
    for override, needed in smaller_settings(inputs, gigabytes):
        lines.append(f"  {override}: {needed.peak.total / 1e9:.1f} GB")
    lines.append("  more GPUs")
    return "\n".join(lines)


def exceeds_memory(inputs: MemoryInputs, hardware: Hardware) -> bool:
    """Return True if the configuration does not fit the memory of GPU or host.

    Host memory is not checked if its size is unknown.

    Args:
        inputs: models, layout and batch.
        hardware: machine that the plan must fit.
    """
    prediction = predict_fullest_stage(inputs, hardware.gigabytes)
    needed, present = prediction.peak.total, hardware.gigabytes * 1e9
    return needed > present or _host_excess(inputs, prediction, hardware) > 0


def _verdict(inputs: MemoryInputs, prediction: MemoryPrediction, hardware: Hardware) -> str:
    """Return the first line of a plan: "fits" or "does not fit", with the difference."""
    peak = prediction.peak
    needed, present = peak.total / 1e9, hardware.gigabytes
    text = f"the {peak.name} needs {needed:.1f} GB of a GPU's {present:g} GB"
    if needed > present:
        return f"does not fit: {text}, {needed - present:.1f} GB too much"

    excess = _host_excess(inputs, prediction, hardware)
    if excess > 0:
        return (
            f"does not fit: {text}, but offloaded state and checkpoints need "
            f"{_host_bytes(inputs, prediction, hardware) / 1e9:.1f} GB of a node's "
            f"{hardware.host_gigabytes:g} GB of memory, {excess / 1e9:.1f} GB too much"
        )
    fits = "fits" if needed <= (1 - PREDICTION_TOLERANCE) * present else "fits, but only just"
    return f"{fits}: {text}, {present - needed:.1f} GB to spare"


def _host_excess(inputs: MemoryInputs, prediction: MemoryPrediction, hardware: Hardware) -> float:
    """Return the bytes that a node's memory lacks; 0 if it is sufficient or unknown."""
    if hardware.host_gigabytes is None:
        return 0.0
    needed = _host_bytes(inputs, prediction, hardware)
    return max(0.0, needed - hardware.host_gigabytes * 1e9)


def _summary(inputs: MemoryInputs, hardware: Hardware) -> str:
    """Return the title of the phase table."""
    text = f"memory per {hardware.gpu}, in bf16, {inputs.tokens} tokens per micro-batch"
    if inputs.adapter is not None:
        base = inputs.quantization or "bf16"
        text += f", adapters of rank {inputs.adapter.rank} on a base in {base}"
        if not inputs.adapter.merge_experts:
            text += ", experts not merged"
    elif inputs.quantization is not None:
        text += f", experts trained through {inputs.quantization}"
    for optimizer in inputs.auxiliary_models:
        text += ", with the critic" if optimizer else ", with the reference policy"
    return f"{text}:"


def _phase_table(prediction: MemoryPrediction) -> list[str]:
    """Return the lines of the phase table, in GB."""
    columns = ("trainer", "servers", "overhead", "total")
    lines = ["  phase         " + "".join(f"{column:>10}" for column in columns) + "  GB"]
    for phase in prediction.phases:
        sizes = (phase.trainer, phase.engine, phase.overhead, phase.total)
        cells = "".join(f"{size / 1e9:10.1f}" for size in sizes)
        mark = "  <- peak" if phase == prediction.peak else ""
        lines.append(f"  {phase.name:14}{cells}{mark}")
    return lines


def _ranks_of_node(inputs: MemoryInputs, hardware: Hardware) -> int:
    """Return the number of ranks on a node."""
    return min(inputs.parallel.world_size, hardware.gpus_per_node)


def _host_bytes(inputs: MemoryInputs, prediction: MemoryPrediction, hardware: Hardware) -> float:
    """Return the peak of offloaded state and checkpoints on a node, in bytes."""
    # Offloaded state stays on the host while a checkpoint is saved, so both add up.
    offloaded = prediction.host * _ranks_of_node(inputs, hardware)
    return offloaded + host_memory_of_save(inputs, hardware.gpus_per_node)


def _host_line(inputs: MemoryInputs, prediction: MemoryPrediction, hardware: Hardware) -> str:
    """Return the line about host memory for offloaded optimizer state."""
    needed = prediction.host * _ranks_of_node(inputs, hardware) / 1e9
    return (
        f"host memory: {needed:.1f} GB, pinned, for the optimizer state of "
        f"{_describe_node(inputs, hardware)}, "
        "in addition to the memory of the run"
    )


def _save_line(inputs: MemoryInputs, prediction: MemoryPrediction, hardware: Hardware) -> str:
    """Return the line about host memory while a checkpoint is saved."""
    needed = host_memory_of_save(inputs, hardware.gpus_per_node) / 1e9
    more = " more" if prediction.host else ""
    text = (
        f"host memory while a checkpoint is saved: {needed:.1f} GB{more} on the fullest node, for "
        "the weights and the fp32 optimizer state of its ranks"
    )
    if hardware.host_gigabytes is None:
        return text

    all_needed = _host_bytes(inputs, prediction, hardware) / 1e9
    together = f"; {all_needed:.1f} GB in total" if prediction.host else ""
    relation = "more than" if all_needed > hardware.host_gigabytes else "of"
    return f"{text}{together}, {relation} its {hardware.host_gigabytes:.0f} GB"


def _describe_node(inputs: MemoryInputs, hardware: Hardware) -> str:
    """Return a node's number of ranks in words."""
    ranks = _ranks_of_node(inputs, hardware)
    return "a node's rank" if ranks == 1 else f"a node's {ranks} ranks"


def describe_layout(layout: ParallelConfig, configured: ParallelConfig) -> str:
    """Return the sizes of a layout, and other settings that must change with it.

    Args:
        layout: layout to describe.
        configured: layout of the configuration.
    """
    text = layout.sizes
    for name in ("virtual_pipeline", "last_stage_layers"):
        value = getattr(layout, name)
        if value != getattr(configured, name):
            text += f", {name} {'null' if value is None else value}"
    return text
