"""Output of ``gptoss plan``, computed from the configuration alone."""

from dataclasses import asdict, dataclass, replace
from itertools import accumulate

from megatron_gptoss.config.precision import bytes_per_number
from megatron_gptoss.context_parallel import (
    AttentionShape,
    ContextLayout,
    balanced_layout,
    candidates,
)
from megatron_gptoss.context_parallel.cost_model import H200, SchemeCost
from megatron_gptoss.context_parallel.head_groups import BACKWARD_COPIES, copied_head_groups
from megatron_gptoss.planning.flops import MATMUL_CEILING, training_flops
from megatron_gptoss.planning.memory import predict_fullest_stage
from megatron_gptoss.planning.memory_advice import Hardware, describe_layout, layouts_that_fit
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.step_time import StepTime, predict_scoring, predict_step
from rl_loop.config.every_run import RunConfig
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.lifecycle.disk_checks import DiskNeed, format_size

LAYOUTS_SHOWN = 5
MEASURED_GPU = "H200"
"""GPU whose measured rates predict times, here and in ``rollout_plan``."""


def full_row(inputs: MemoryInputs) -> list[int]:
    """Return the sequence lengths of a micro-batch filled with episodes of maximum length."""
    longest = inputs.longest_sequence
    # A row is filled with whole episodes, and a shorter one takes the rest.
    lengths = [longest] * (inputs.tokens // longest)
    if inputs.tokens % longest:
        lengths.append(inputs.tokens % longest)
    return lengths


@dataclass(frozen=True)
class SharedPrompts:
    """Prompts that are computed once per micro-batch."""

    samples: int
    """Sequences that share a prompt."""
    tokens: int
    """Tokens of a prompt, at least ``training.min_shared``."""


def shared_prompts(config: RunConfig, tokens: int) -> SharedPrompts | None:
    """Return the prompts that a run shares; None if it shares none.

    Args:
        config: configuration of the run.
        tokens: tokens of a prompt. In supervised runs all sequences of a step share it.
    """
    sharing = config.training.prefix_sharing
    if sharing is None or tokens < sharing.min_shared:
        return None
    if isinstance(config, RlConfig):
        samples = config.rollout.samples_per_task
    else:
        assert isinstance(config, SftConfig)
        # A prompt ends before the first token in the loss.
        has_prompt = not (sharing.prompts_only and config.trains_all_tokens)
        samples = config.sequences_per_step if has_prompt else 1
    return None if samples == 1 else SharedPrompts(samples, tokens)


@dataclass(frozen=True)
class PlannedRow:
    """Full micro-batch."""

    lengths: list[int]
    """Tokens of each sequence. With ``starts``: position after the last token of each segment."""
    starts: list[int]
    """Position of each segment's first token. Empty if sequences share no prompts."""
    sequence_tokens: int
    """Tokens of all sequences."""

    @property
    def tokens(self) -> int:
        """Computed tokens."""
        return sum(self.lengths) - sum(self.starts)

    def copied_key_bytes(self, inputs: MemoryInputs) -> int:
        """Return the bytes of keys and values that an attention call of a full layer copies."""
        model = inputs.model
        heads = model.num_key_value_heads // inputs.parallel.tensor
        key_and_value = 2 * model.head_size * bytes_per_number("bf16")
        # Every segment gets a copy of all keys before its end.
        keys = sum(self.lengths)
        group = copied_head_groups(keys, heads, key_and_value)[0]
        return keys * (group.stop - group.start) * key_and_value


def planned_row(inputs: MemoryInputs, shared: SharedPrompts | None) -> PlannedRow:
    """Return a micro-batch that is filled with sequences of maximum length."""
    longest = inputs.longest_sequence
    if shared is None:
        full = full_row(inputs)
        return PlannedRow(full, [], sum(full))

    # At least one token of every sequence is not shared.
    prompt = min(shared.tokens, longest - 1)
    sampled_tokens = longest - prompt
    left = inputs.tokens
    lengths: list[int] = []
    starts: list[int] = []
    sequences = 0
    # A group that does not fit is cut, and both parts compute the prompt.
    while left >= longest:
        samples = min(shared.samples, (left - prompt) // sampled_tokens)
        lengths += [prompt] + [longest] * samples
        starts += [0] + [prompt] * samples
        left -= prompt + samples * sampled_tokens
        sequences += samples
    return PlannedRow(lengths, starts, sequences * longest)


@dataclass(frozen=True)
class UpdatePrediction:
    """Predicted time of one update with a parallel layout."""

    micro_batches: int
    """Micro-batches per data-parallel rank."""
    episodes: int
    """Number of sequences, all of maximum length."""
    tokens: int
    """Tokens of all sequences in the whole update."""
    computed_tokens: int
    """Tokens in all micro-batches. A shared prompt counts once per micro-batch."""
    step: StepTime
    tokens_per_second: float
    """Tokens per second and GPU."""
    mfu: float
    """Model FLOPs utilization: model arithmetic over the GPUs' matrix peak for the same time."""

    def __str__(self) -> str:
        speed = f"{self.tokens_per_second:.0f} tokens/s/GPU"
        return f"{self.step.total:.2f} s, {speed}, {self.mfu:.1%} MFU"


def predict_update(
    inputs: MemoryInputs, sequences: int | None = None, shared: SharedPrompts | None = None
) -> UpdatePrediction:
    """Predict an update at the rates of H200 GPUs, with sequences of maximum length.

    Args:
        inputs: model, layout and batch.
        sequences: number of sequences per update; None: the number of ``inputs``. Supervised runs
            do not have it in ``inputs``, because their memory does not depend on it.
        shared: prompts that sequences share; None if every sequence is computed whole.
    """
    parallel = inputs.parallel
    row = planned_row(inputs, shared)
    episodes = sequences or int(inputs.sequences)

    # Rounded up to a multiple that the pipeline's schedule accepts.
    multiple = parallel.micro_batch_multiple
    tokens_per_multiple = row.sequence_tokens * parallel.data * multiple
    micro_batches = multiple * max(1, -(-episodes * inputs.longest_sequence // tokens_per_multiple))

    step = predict_step(
        inputs.model,
        parallel,
        inputs.optimizer,
        row.lengths,
        micro_batches,
        adapter=inputs.adapter,
        quantization=inputs.quantization,
        starts=row.starts,
    )

    gpu_seconds = step.total * parallel.world_size
    # Includes the sequences that fill the last micro-batches.
    rows = micro_batches * parallel.data
    tokens = row.sequence_tokens * rows
    # A frozen base has no weight gradients, one of three products per weight.
    frozen_base = inputs.adapter is not None
    flops = rows * training_flops(inputs.model, row.lengths, row.starts, frozen_base=frozen_base)

    return UpdatePrediction(
        micro_batches=micro_batches,
        episodes=episodes,
        tokens=tokens,
        computed_tokens=rows * row.tokens,
        step=step,
        tokens_per_second=tokens / gpu_seconds,
        mfu=flops / gpu_seconds / MATMUL_CEILING,
    )


def scoring_seconds(inputs: MemoryInputs, sequences: int | None = None) -> float:
    """Return the predicted seconds in which teachers score the sequences of an update.

    Every sequence has one teacher, and all teachers have equally many sequences.

    Args:
        inputs: model, layout, teachers and batch.
        sequences: see ``predict_update``.
    """
    if not inputs.teachers:
        return 0.0
    row = planned_row(inputs, None)
    micro_batches = predict_update(inputs, sequences).micro_batches
    total = sum(
        predict_scoring(teacher, inputs.parallel.for_teacher(teacher), row.lengths, micro_batches)
        for teacher in inputs.teachers
    )
    return total / len(inputs.teachers)


def speed_notes(hardware: Hardware, made_for: float | None) -> list[str]:
    """Return notes on the hardware of a plan.

    Args:
        hardware: GPU of the plan.
        made_for: ``gpu_gb`` of the configuration, in GB.
    """
    notes = []
    if MEASURED_GPU not in hardware.gpu:
        notes.append(
            f"update times are for {MEASURED_GPU} GPUs, whose rates were measured; memory is for the "
            f"planned GPU ({hardware.gpu}, {hardware.gigabytes:g} GB)"
        )
    if made_for is not None and made_for != hardware.gigabytes:
        notes.append(
            f"the configuration is for GPUs of {made_for:g} GB (gpu_gb): with "
            f"{hardware.gigabytes:g} GB another layout may be faster"
        )
    return notes


def disk_plan(need: DiskNeed) -> str:
    """Describe the disk space of a run."""
    total = format_size(need.missing_bytes())
    return f"disk: {total} in output_dir, for {need.describe()}, in addition to episodes and logs"


def step_plan(
    inputs: MemoryInputs,
    gigabytes: float,
    sequences: int | None = None,
    shared: SharedPrompts | None = None,
) -> str:
    """Describe the time of one update with the configured and with the fastest layouts.

    Args:
        inputs: model, layout and batch.
        gigabytes: memory of a GPU in GB (1e9 bytes).
        sequences: see ``predict_update``.
        shared: prompts that sequences share; None if every sequence is computed whole.
    """
    configured = predict_update(inputs, sequences)
    # Leave out parts that would be shown as 0.00.
    seconds = asdict(configured.step)
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005)
    scoring = scoring_seconds(inputs, sequences)
    teachers = [f"the teacher's scoring of these sequences: {scoring:.2f} s"] if scoring else []
    # A line of its own, because the layouts below are compared with whole sequences.
    sharing = [] if shared is None else [_sharing_line(inputs, configured, shared)]
    return "\n".join(
        [
            f"an update at {MEASURED_GPU} rates with {configured.episodes} sequences of the "
            f"maximum {inputs.longest_sequence} tokens ({configured.tokens} tokens in "
            f"{configured.micro_batches} micro-batches per data-parallel rank): {configured} "
            f"({parts})",
            *teachers,
            *sharing,
            *_layout_lines(inputs, configured, gigabytes),
        ]
    )


def _sharing_line(inputs: MemoryInputs, unshared: UpdatePrediction, shared: SharedPrompts) -> str:
    """Return a line for the update with shared prompts.

    Args:
        inputs: model, layout and batch.
        unshared: update that computes every sequence whole.
        shared: the prompts.
    """
    update = predict_update(inputs, unshared.episodes, shared)
    gain = update.tokens_per_second / unshared.tokens_per_second
    copied = planned_row(inputs, shared).copied_key_bytes(inputs)
    return (
        f"with {shared.samples} sequences per prompt of {shared.tokens} tokens, which they share: "
        f"{update.computed_tokens} computed tokens "
        f"({1 - update.computed_tokens / update.tokens:.0%} saved) in {update.micro_batches} "
        f"micro-batches per data-parallel rank: {update}, {gain:.2f}x as fast; copied keys take up "
        f"to {BACKWARD_COPIES * copied / 1e9:.1f} GB in one layer at a time"
    )


def _layout_lines(
    inputs: MemoryInputs, configured: UpdatePrediction, gigabytes: float
) -> list[str]:
    """Return lines for the fastest layouts that fit, and for the configured layout if it fits."""
    predictions = layouts_that_fit(inputs, gigabytes)
    # layouts_that_fit does not try pipelines whose last stage has fewer layers.
    if all(layout != inputs.parallel for layout, _ in predictions):
        prediction = predict_fullest_stage(inputs, gigabytes)
        if prediction.peak.total <= gigabytes * 1e9:
            predictions.append((inputs.parallel, prediction))
    gpus = inputs.parallel.world_size
    if not predictions:
        return [f"no layout of the trainer's {gpus} GPUs fits"]

    # Layouts round up to full micro-batches differently, so compare tokens per second.
    fitting = [
        (predict_update(replace(inputs, parallel=layout), configured.episodes), layout, prediction)
        for layout, prediction in predictions
    ]
    fitting.sort(key=lambda entry: -entry[0].tokens_per_second)
    fastest = fitting[0][0].tokens_per_second

    lines = [f"predicted fastest layouts of the trainer's {gpus} GPUs that fit:"]
    for place, (update, layout, prediction) in enumerate(fitting):
        is_configured = layout == inputs.parallel
        # The configured layout is always shown, to compare it with the fastest.
        if place >= LAYOUTS_SHOWN and not is_configured:
            continue
        needed = prediction.peak.total / 1e9
        line = f"  {describe_layout(layout, inputs.parallel)}: {needed:.1f} GB, {update}"
        if is_configured:
            line += "  <- configured"
            slower = 1 - configured.tokens_per_second / fastest
            # Smaller differences would be shown as 0%.
            if slower >= 0.005:
                line += f", {slower:.0%} slower than the fastest"
        lines.append(line)
    return lines


def attention_plan(inputs: MemoryInputs, dtype: str) -> str:
    """Describe the communication and cost of each context-parallel scheme, per kind of layer.

    At run time the same model chooses the scheme of every row by its actual lengths.

    Args:
        inputs: model, layout and batch. The row is filled with episodes of maximum length.
        dtype: fp32 or bf16.
    """
    parallel = inputs.parallel
    if parallel.context == 1:
        return "context parallelism: none (parallel.context is 1); every rank computes whole rows"

    layout = _padded_layout(inputs)
    sequences = len(layout.offsets) - 1
    lines = [
        f"context parallelism over {parallel.context} ranks: {inputs.tokens} tokens in {sequences} "
        f"sequences, {layout.tokens_per_rank} tokens per rank, {max(layout.shared)} of them in "
        "shared sequences",
        f"one layer, forward and backward, at {H200.bandwidth / 1e9:g} GB/s and "
        f"{H200.rate / 1e12:g} TFLOP/s:",
        f"  {'layers':22}{'scheme':12}{'sent MB':>10}{'communication ms':>18}{'computation ms':>16}"
        f"{'total ms':>13}",
    ]
    lines += _scheme_lines(inputs, dtype, layout, kind="full_attention")
    lines += _scheme_lines(inputs, dtype, layout, kind="sliding_attention")
    return "\n".join(lines)


def _padded_layout(inputs: MemoryInputs) -> ContextLayout:
    """Return the context-parallel layout of a full row, padded like a real row."""
    parallel = inputs.parallel
    lengths = full_row(inputs)
    # Context and tensor parallelism split the tokens of a row evenly.
    padding = -inputs.tokens % (parallel.context * parallel.tensor)
    if padding:
        lengths.append(padding)
    return balanced_layout((0, *accumulate(lengths)), parallel.context)


def _scheme_lines(inputs: MemoryInputs, dtype: str, layout: ContextLayout, kind: str) -> list[str]:
    """Return a line per scheme that layers of ``kind`` (as in layer_types) can use."""
    model = inputs.model
    parallel = inputs.parallel
    window: int | None = None
    configured: str = parallel.context_scheme_full
    if kind == "sliding_attention":
        window = model.sliding_window
        configured = parallel.context_scheme_window

    # Tensor parallelism splits heads before context parallelism.
    shape = AttentionShape(
        model.num_attention_heads // parallel.tensor,
        model.num_key_value_heads // parallel.tensor,
        model.head_size,
        bytes_per_number(dtype),
    )
    costs = candidates(layout, shape, window, H200)  # best first
    chosen = costs[0].scheme if configured == "auto" else configured

    lines = []
    for cost in costs:
        line = f"  {model.layer_types.count(kind):3} {kind:18}{_cost_columns(cost)}"
        if cost.scheme == chosen:
            line += "  <- used"
            if configured != "auto":
                line += " (set)"
        lines.append(line)
    return lines


def _cost_columns(cost: SchemeCost) -> str:
    return (
        f"{cost.scheme:12}{cost.bytes_sent / 1e6:10.2f}{cost.communication * 1e3:18.3f}"
        f"{cost.computation * 1e3:16.3f}{cost.seconds * 1e3:13.3f}"
    )
