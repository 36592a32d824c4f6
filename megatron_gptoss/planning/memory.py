"""Prediction of one GPU's memory in each phase of a training step, from the configuration.

``gptoss plan`` uses it for layouts before they run. The ``memory/*`` metrics of a run show it next
to the measured memory. docs/performance/memory.md compares predictions with measurements, and
docs/design/planning.md describes the phases.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from megatron_gptoss.config.precision import bytes_per_number
from megatron_gptoss.planning.activation_memory import (
    activation_memory,
    attention_blocks,
    expert_load,
    scoring_memory,
    temporary_memory,
)
from megatron_gptoss.planning.memory_inputs import EngineMemory, MemoryInputs
from megatron_gptoss.planning.state_memory import (
    dequantized_bytes,
    gathered_for_checkpoint,
    loaded_state_bytes,
    optimizer_state,
    scratch_weight_bytes,
    trained_models,
    trained_parameters,
    weight_memory,
)
from megatron_gptoss.planning.sync_memory import arriving_bytes, sent_tensor_bytes

# Measured on one H200.
CONTEXT_BYTES = 2.7e9
"""A process's GPU memory outside of torch's allocator, from the first optimizer step on.

It includes the CUDA context, libraries with their workspaces, and kernels.
"""

OPTIMIZER_CONTEXT_BYTES = 0.9e9
"""Part of CONTEXT_BYTES that the first optimizer step adds."""

FIRST_CONTEXT_BYTES = 1.3e9
"""A process's GPU memory outside of torch's allocator before the first forward pass."""

# Estimated from differences. The memory outside of torch grows by 2.3 GB from one to two ranks and
# by 3.0 GB from one to four ranks (20B model on H200, with one-GPU servers).
COMMUNICATION_BYTES = 2.6e9
"""Buffers of NCCL with more than one rank.

Megatron has a communicator per group. Each allocates its buffers at its first use.
"""

# Measured in the first weight sync of two and four ranks. Buffers take only 0.3 GB in phase
# ``start``. There the excess stands for fragmentation of up to 0.9 GB, which is not predicted
# separately.
FIRST_COMMUNICATION_BYTES = 0.9e9
"""Buffers of NCCL before the first forward pass."""

PHASES_BEFORE_FORWARD_PASS = ("start", "first_sync")
"""Phases before the first forward pass of a run."""
PHASES_BEFORE_OPTIMIZER_STEP = (*PHASES_BEFORE_FORWARD_PASS, "first_scoring")
"""Phases of a new run in which the optimizer has no state.

A resumed run has state from the start, and its servers are paused until the first weight sync.
"""

# Measured: 2.5, 2.9 and 4.2 GB on one H200 with 82, 67 and 47 GB of tensors and 16,384 tokens. The
# 4.2 GB occurred in scoring when layers still kept a small tensor after their forward pass.
FRAGMENTATION_BYTES = 3.2e9
"""Fragmentation: memory that torch's allocator holds beyond the peak of allocated tensors.

It occurs in phases that allocate and free blocks of many sizes. For scoring see
``_scoring_fragmentation_bytes``.
"""

# Fitted: 0.60 to 0.71 in the first scoring of runs on two and four H200 with 4, 24 and 36 layers.
SCORING_FRAGMENTATION_SHARE = 0.65
"""Fragmentation that a layer adds in scoring, relative to the memory of its forward pass.

A layer adds it if its experts get more tokens than the experts of all earlier layers.
"""

PHASES_WITH_FRAGMENTATION = ("first_scoring", "scoring", "update", "optimizer", "checkpoint")
"""Phases with fragmentation. A weight sync has few large buffers, whose sizes are known."""

# Pinned memory is allocated in powers of 2. For the 20B model on two GPUs this adds 1% to expert
# matrices and nearly 100% to embedding and output layer.
HOST_ROUNDING = 1.06
"""Pinned host memory relative to the size of the tensors in it."""


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes of one pipeline stage's tensors in the update, summed over all models."""

    weights: float
    """Weights."""
    gradients: float
    """Gradients."""
    optimizer: float
    """Optimizer state that stays on the GPU between steps."""
    activations: float
    """Activations kept for the backward pass, of all micro-batches in flight."""
    temporary: float
    """Temporary tensors: the maximum of log-prob blocks and the backward pass of one layer."""
    loaded_optimizer_state: float
    """Offloaded optimizer state that is on the GPU at one time in the optimizer step.

    Only the part that exceeds the space of activations and temporary tensors.
    """

    @property
    def persistent(self) -> float:
        """Bytes that stay on the GPU between steps."""
        return sum((self.weights, self.gradients, self.optimizer))

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(astuple(self))


@dataclass(frozen=True)
class MemoryPhase:
    """Bytes on the whole GPU at the peak of a step's phase."""

    name: str
    """Name of the phase, as in the ``memory/*`` metrics."""
    trainer: float
    """Tensors of the trainer process, as counted by ``torch.cuda.max_memory_allocated``."""
    engine: float
    """All memory of servers that share the GPU, including buffers of a weight sync."""
    overhead: float
    """Contexts, communicators, fragmentation, and memory that torch keeps from earlier phases."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.trainer + self.engine + self.overhead


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted memory of a GPU of one pipeline stage, by phase."""

    memory: UpdateMemory
    """Parts of the update."""
    phases: Sequence[MemoryPhase]
    """Phases in the order of a run."""
    host: float
    """Bytes of host memory for the offloaded optimizer state of one GPU."""

    @property
    def peak(self) -> MemoryPhase:
        """Phase with the most memory."""
        most = max(phase.total for phase in self.phases)
        fullest = (phase for phase in self.phases if math.isclose(phase.total, most))

        # Phases can have equal totals, because torch keeps the memory of an earlier phase. Report
        # the phase that needs the memory itself.
        return max(fullest, key=lambda phase: phase.trainer)

    def phase(self, name: str) -> MemoryPhase:
        """Return the phase with this name."""
        return next(phase for phase in self.phases if phase.name == name)


def predict_update_memory(inputs: MemoryInputs, stage: int = 0) -> UpdateMemory:
    """Predict the tensors on the GPUs of a pipeline stage in the update.

    Args:
        inputs: models, layout and batch.
        stage: index of the pipeline stage.
    """
    activations = activation_memory(inputs, stage)
    temporary = temporary_memory(inputs, stage)

    gradients = 0.0
    resident_state = 0.0
    loaded_optimizer_state = 0.0
    for trained in trained_models(inputs, stage):
        parameters = trained.dense + trained.expert
        gradients += bytes_per_number(trained.optimizer.gradient_dtype) * parameters
        resident_state += (1 - trained.optimizer.offload_fraction) * optimizer_state(
            trained, inputs.parallel
        )

        # Loaded state reuses the space of activations, which are freed by then. The optimizers of
        # several models step one after another, so only the largest part counts.
        loaded_optimizer_state = max(
            loaded_optimizer_state, loaded_state_bytes(inputs, trained) - activations - temporary
        )

    return UpdateMemory(
        weights=weight_memory(inputs, stage),
        gradients=gradients,
        optimizer=resident_state,
        activations=activations,
        temporary=temporary,
        loaded_optimizer_state=loaded_optimizer_state,
    )


def predict_stage_memory(
    inputs: MemoryInputs, gigabytes: float, stage: int = 0
) -> MemoryPrediction:
    """Predict the memory of every phase for one pipeline stage.

    Args:
        inputs: models, layout, batch and servers.
        gigabytes: memory of the GPU in units of 1e9 bytes. Servers on the GPU get a fraction of it.
        stage: index of the pipeline stage.
    """
    memory = predict_update_memory(inputs, stage)
    loaded_optimizer_state = max(
        loaded_state_bytes(inputs, trained) for trained in trained_models(inputs, stage)
    )
    engine = inputs.engine or EngineMemory()
    running = engine.running_fraction * gigabytes * 1e9
    paused = engine.paused_bytes

    # The memory for merged, rounded or dequantized weights does not exist at the start, and it is
    # released before a weight sync. It still exists in the optimizer step.
    own_weights = memory.weights - scratch_weight_bytes(inputs)
    start = own_weights + memory.gradients + _copied_weights(inputs, stage)
    stepping = memory.persistent + loaded_optimizer_state + dequantized_bytes(inputs)
    scoring = memory.persistent + scoring_memory(inputs, stage)

    needs = [_Need("start", start, 0)]
    if inputs.engine is not None:
        sent = sent_tensor_bytes(inputs)
        syncing = own_weights + memory.gradients + sent + arriving_bytes(inputs)
        received: float = engine.sync_bytes
        if engine.copies_buckets:
            received += sent
        needs += [
            # The servers have just started, with everything that they allocate at startup.
            _Need("first_sync", syncing, running - engine.working_bytes + received),
            _Need("first_scoring", scoring - memory.optimizer, paused),
            # Paused servers resume with their weights. Caches and graphs follow after the sync.
            _Need("sync", syncing + memory.optimizer, paused + engine.weight_bytes + received),
            _Need("rollout", memory.persistent, running),
        ]
    needs += [
        _Need("scoring", scoring, paused),
        _Need("update", memory.persistent + memory.activations + memory.temporary, paused),
        _Need("optimizer", stepping, paused),
        _Need("checkpoint", memory.persistent + gathered_for_checkpoint(inputs, stage), paused),
    ]

    host = 0.0
    for trained in trained_models(inputs, stage):
        state = optimizer_state(trained, inputs.parallel)
        host += HOST_ROUNDING * trained.optimizer.offload_fraction * state
    return MemoryPrediction(
        memory=memory,
        phases=_phases(inputs, needs, stage),
        host=host,
    )


def predict_fullest_stage(inputs: MemoryInputs, gigabytes: float) -> MemoryPrediction:
    """Predict the memory of every phase for the pipeline stage with the highest peak.

    Args:
        inputs: models, layout, batch and servers.
        gigabytes: memory of the GPU in units of 1e9 bytes.
    """
    stages = range(inputs.parallel.pipeline)
    predictions = [predict_stage_memory(inputs, gigabytes, stage) for stage in stages]
    return max(predictions, key=lambda prediction: prediction.peak.total)


def fits(inputs: MemoryInputs, gigabytes: float) -> bool:
    """Return True if every phase fits on a GPU.

    Args:
        inputs: models, layout, batch and servers.
        gigabytes: memory of the GPU in units of 1e9 bytes.
    """
    return predict_fullest_stage(inputs, gigabytes).peak.total <= gigabytes * 1e9


@dataclass(frozen=True)
class _Need:
    """Memory of a phase without memory kept from earlier phases. See ``MemoryPhase`` for the fields."""

    phase: str
    """Name of the phase."""
    trainer: float
    """Bytes of the trainer's tensors."""
    engine: float
    """Bytes of the servers."""


def _phases(inputs: MemoryInputs, needs: Sequence[_Need], stage: int) -> list[MemoryPhase]:
    """Return the phases with the memory outside of tensors added.

    Args:
        inputs: models, layout and batch.
        needs: memory of each phase, in the order of a run.
        stage: index of the pipeline stage.
    """
    # torch's allocator keeps its peak until the cache is emptied, so a phase may hold memory that
    # an earlier phase allocated.
    with_cache = _phases_starting_with_cache(inputs)
    reserved = 0.0
    phases = []
    for need in needs:
        if need.phase not in with_cache:
            reserved = 0.0
        reserved = max(reserved, need.trainer + _fragmentation_bytes(inputs, need.phase, stage))

        overhead = _process_bytes(inputs, need.phase) + reserved - need.trainer
        phases.append(MemoryPhase(need.phase, need.trainer, need.engine, overhead))
    return phases


def _process_bytes(inputs: MemoryInputs, phase: str) -> float:
    """Return the bytes that the process holds outside of torch's allocator in a phase."""
    context = CONTEXT_BYTES
    communication = COMMUNICATION_BYTES
    if phase in PHASES_BEFORE_FORWARD_PASS:
        context = FIRST_CONTEXT_BYTES
        communication = FIRST_COMMUNICATION_BYTES
    elif phase in PHASES_BEFORE_OPTIMIZER_STEP:
        context -= OPTIMIZER_CONTEXT_BYTES

    if inputs.parallel.world_size == 1:
        return context
    return context + communication


def _fragmentation_bytes(inputs: MemoryInputs, phase: str, stage: int) -> float:
    """Return the bytes that torch's allocator reserves beyond the allocated peak of a phase."""
    if phase not in PHASES_WITH_FRAGMENTATION:
        return 0.0
    if phase in ("first_scoring", "scoring"):
        return _scoring_fragmentation_bytes(inputs, stage)
    if phase == "update":
        # With expert parallelism, the tokens of a rank's experts differ in number between layers. A
        # layer with more tokens cannot reuse the freed blocks of a layer with fewer. Measured
        # beyond FRAGMENTATION_BYTES: 1.7 GB with experts on 2 GPUs, and 5.2 and 5.6 GB on 4 GPUs.
        # Predicted: 1.8, 4.6 and 3.2 GB.
        excess = expert_load(inputs.model, inputs.parallel) - 1
        return FRAGMENTATION_BYTES + excess * activation_memory(inputs, stage)
    return FRAGMENTATION_BYTES


def _scoring_fragmentation_bytes(inputs: MemoryInputs, stage: int) -> float:
    """Return the bytes that torch's allocator reserves beyond the allocated peak in scoring."""
    # Scoring computes one layer after another, from an empty cache. A layer reuses the blocks of
    # earlier layers if its tensors fit into them.
    #
    # With expert parallelism, the tokens of a rank's experts differ in number between layers. A
    # layer with more tokens than all earlier layers needs new blocks, and the old blocks stay
    # reserved. If the order of n layers is random, 1/2 + 1/3 + ... + 1/n such layers are expected
    # after the first layer.
    if inputs.parallel.expert > 1:
        layers = inputs.parallel.layers_of_stage(stage, inputs.model)
        larger_layers = sum(1 / number for number in range(2, layers + 1))
        return SCORING_FRAGMENTATION_SHARE * larger_layers * scoring_memory(inputs, stage)

    # Without expert parallelism, all layers have the same number of tokens, and the micro-batch
    # with most tokens comes first. Therefore only the blocks of attention are reserved in addition:
    # 0.5 GB for 16,384 tokens, or 1.1 GB on an H100. This was measured with adapters only, so full
    # training is predicted with FRAGMENTATION_BYTES.
    if inputs.adapter is not None:
        return attention_blocks(inputs)
    return FRAGMENTATION_BYTES


def _phases_starting_with_cache(inputs: MemoryInputs) -> set[str]:
    """Return the phases at whose start torch still holds memory of earlier phases."""
    # The trainer empties the cache after its construction, after a weight sync, before the step of
    # an optimizer with offloaded state, and after each update if engines share the GPU.
    phases = {"update"}
    if not _all_offload(inputs):
        phases.add("optimizer")
    if inputs.engine is None:
        phases.add("checkpoint")
    return phases


def _all_offload(inputs: MemoryInputs) -> bool:
    """Return True if the policy and all critics offload optimizer state to the host."""
    optimizers = [inputs.optimizer, *filter(None, inputs.auxiliary_models)]
    return all(optimizer.offload_fraction > 0 for optimizer in optimizers)


def _copied_weights(inputs: MemoryInputs, stage: int) -> float:
    """Return the bytes of trained weights' original tensors."""
    # Megatron copies trained weights into its buffers, and the originals exist at the same time.
    # With offloaded optimizer state the originals are on the host.
    if _all_offload(inputs):
        return 0.0
    return 2 * sum(trained_parameters(inputs, stage))
