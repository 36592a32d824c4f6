"""Memory of one GPU over a step of bf16 training, predicted from the configuration alone.

It is for ``gptoss plan``, for layouts that nobody has run yet, and for the ``memory/*`` metrics of
a run, which show it beside what was measured. docs/performance.md compares it with measurements and
says which constants were measured where.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from megatron_gptoss.planning.activation_memory import (
    activation_memory,
    attention_blocks,
    expert_load,
    scoring_memory,
    working_memory,
)
from megatron_gptoss.planning.memory_inputs import EngineMemory, MemoryInputs
from megatron_gptoss.planning.parameter_counts import bytes_of
from megatron_gptoss.planning.state_memory import (
    dequantized_bytes,
    fetched_state,
    gathered_for_checkpoint,
    optimizer_state,
    shared_weight_bytes,
    trained_models,
    trained_parameters,
    weight_memory,
)
from megatron_gptoss.planning.sync_memory import arriving_bytes, sent_tensor_bytes

CONTEXT_BYTES = 2.7e9
"""What a process holds of its GPU outside of torch's allocator: CUDA's context, libraries and their
workspaces, kernels, from the first optimizer step on, on one H200."""

OPTIMIZER_CONTEXT_BYTES = 0.9e9
"""Part of CONTEXT_BYTES that comes with the first optimizer step."""

FIRST_CONTEXT_BYTES = 1.3e9
"""The same before the first forward pass."""

COMMUNICATION_BYTES = 2.6e9
"""NCCL's buffers where there is more than one rank: Megatron has a communicator for each of its groups,
and each takes some when it is first used.

By difference, not measured by itself: what is on a GPU besides torch's memory is 2.3 GB more with two
ranks than with one, and 3.0 more with four, each beside a server of one GPU (the 20B on H200s)."""

FIRST_COMMUNICATION_BYTES = 0.9e9
"""The same before the first forward pass, in the first weight sync of two and of four ranks; 0.3 at the
start, where gaps of up to 0.9 GB come in its place."""

PHASES_BEFORE_A_FORWARD_PASS = ("start", "first_sync")
PHASES_BEFORE_AN_OPTIMIZER_STEP = (*PHASES_BEFORE_A_FORWARD_PASS, "first_scoring")
"""Phases of a fresh run's first step, in which the optimizer has no state. A resumed run has state
from its start on. Its servers sleep until their first weight sync."""

GAP_BYTES = 3.2e9
"""What torch's allocator holds beyond the most that is allocated, in phases that allocate and free
blocks of many sizes. 2.5, 2.9 and 4.2 GB on one H200 beside 82, 67 and 47 GB of tensors, with
16,384 tokens; none while weights and gradients were made.

The 4.2 GB, in scoring, are older than layers that keep no tensor of the tokens after their forward
pass: every layer had a small one in a block of the update before, which torch could not give back.
Scoring in full training on one GPU was not measured again, so that it has the whole allowance; for
other runs see ``_scoring_gap_bytes``."""

SCORING_GAP_SHARE = 0.65
"""Of what a layer's forward pass needs, what one with more rows for its experts than all layers before
it leaves of their blocks. 0.60 to 0.71 in the first scoring of four runs on two and four H200, with 4,
24 and 36 layers, if the rows of layers come in random order (``_scoring_gap_bytes``)."""

PHASES_WITH_GAPS = ("first_scoring", "scoring", "update", "optimizer", "checkpoint")
"""Phases that have gaps. A sync's buffers are few and large; their sizes are counted."""

HOST_ROUNDING = 1.06
"""Pinned host memory, relative to the tensors in it: torch takes powers of two. Counted for the 20B
on two GPUs: 1 % for the experts' matrices, nearly twice for embedding and output layer."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a pipeline stage's tensors in the update, of all models together."""

    weights: float
    gradients: float
    optimizer: float
    """State that stays on the GPU between steps."""
    activations: float
    """Kept from the forward for the backward pass, of all micro-batches in flight."""
    working: float
    """The larger of the log-probs' blocks and what one layer's backward pass needs besides."""
    fetched: float
    """Offloaded optimizer state that is on the GPU at a time in the optimizer's step and does not
    fit where activations and working memory were."""

    @property
    def resting(self) -> float:
        """What stays on the GPU between steps."""
        return sum((self.weights, self.gradients, self.optimizer))

    @property
    def total(self) -> float:
        return sum(astuple(self))


@dataclass(frozen=True)
class Phase:
    """Bytes of the whole GPU at the peak of one phase of a step."""

    name: str
    """As in the names of the ``memory/*`` metrics."""
    trainer: float
    """Tensors of the trainer's process, as ``torch.cuda.max_memory_allocated`` counts them."""
    engine: float
    """Everything of the servers that share the GPU, and the buffers of a weight sync."""
    around: float
    """Contexts, communicators and what torch's allocator holds besides these tensors: its gaps, and
    what an earlier phase took and the trainer has not given back."""

    @property
    def total(self) -> float:
        return self.trainer + self.engine + self.around


@dataclass(frozen=True)
class Account:
    """What a GPU of one pipeline stage holds, phase by phase in the order of a run."""

    memory: Memory
    """The parts of the update."""
    phases: Sequence[Phase]
    host: float
    """Bytes of host memory for the offloaded optimizer state of one GPU."""

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        most = max(phase.total for phase in self.phases)
        fullest = (phase for phase in self.phases if math.isclose(phase.total, most))

        # Several hold as much where torch keeps what the first of them took.
        return max(fullest, key=lambda phase: phase.trainer)

    def phase(self, name: str) -> Phase:
        """Return the phase of this name."""
        return next(phase for phase in self.phases if phase.name == name)


def predict(inputs: MemoryInputs, stage: int = 0) -> Memory:
    """Predict what the GPUs of one pipeline stage hold in the update."""
    activations = activation_memory(inputs, stage)
    working = working_memory(inputs, stage)

    gradients = 0.0
    resident_state = 0.0
    fetched = 0.0
    for trained in trained_models(inputs, stage):
        parameters = trained.dense + trained.expert
        gradients += bytes_of(trained.optimizer.gradient_dtype) * parameters
        resident_state += (1 - trained.optimizer.offload) * optimizer_state(
            trained, inputs.parallel
        )

        # A part of the state takes the place of the activations, which are gone by then. Models
        # step one after the other, so only the largest part counts.
        fetched = max(fetched, fetched_state(inputs, trained) - activations - working)

    return Memory(
        weights=weight_memory(inputs, stage),
        gradients=gradients,
        optimizer=resident_state,
        activations=activations,
        working=working,
        fetched=fetched,
    )


def account(inputs: MemoryInputs, gigabytes: float, stage: int = 0) -> Account:
    """Predict every phase of a run on GPUs of ``gigabytes`` (1e9 bytes) for one pipeline stage.

    Servers that share the GPU have their share of ``gigabytes``.
    """
    memory = predict(inputs, stage)
    fetched = max(fetched_state(inputs, trained) for trained in trained_models(inputs, stage))
    engine = inputs.engine or EngineMemory()
    awake = engine.awake_fraction * gigabytes * 1e9
    asleep = engine.asleep_bytes

    # Nothing has been merged, rounded or dequantized yet at the start, and the memory for it has been
    # given back before a sync; in the optimizer's step it is still there.
    own_weights = memory.weights - shared_weight_bytes(inputs)
    start = own_weights + memory.gradients + _copied_weights(inputs, stage)
    stepping = memory.resting + fetched + dequantized_bytes(inputs)
    scoring = memory.resting + scoring_memory(inputs, stage)

    needs = [_Need("start", start, 0)]
    if inputs.engine is not None:
        sent = sent_tensor_bytes(inputs)
        syncing = own_weights + memory.gradients + sent + arriving_bytes(inputs)
        received: float = engine.sync_bytes
        if engine.copies_buckets:
            received += sent
        needs += [
            # Servers have just started, with all that they allocate then.
            _Need("first_sync", syncing, awake - engine.working_bytes + received),
            _Need("first_scoring", scoring - memory.optimizer, asleep),
            # Servers that were asleep wake with their weights, and with caches and graphs only after
            # the sync.
            _Need("sync", syncing + memory.optimizer, asleep + engine.weight_bytes + received),
            _Need("rollout", memory.resting, awake),
        ]
    needs += [
        _Need("scoring", scoring, asleep),
        _Need("update", memory.resting + memory.activations + memory.working, asleep),
        _Need("optimizer", stepping, asleep),
        _Need("checkpoint", memory.resting + gathered_for_checkpoint(inputs, stage), asleep),
    ]

    host = 0.0
    for trained in trained_models(inputs, stage):
        state = optimizer_state(trained, inputs.parallel)
        host += HOST_ROUNDING * trained.optimizer.offload * state
    return Account(
        memory=memory,
        phases=_phases(inputs, needs, stage),
        host=host,
    )


def worst_account(inputs: MemoryInputs, gigabytes: float) -> Account:
    """Predict every phase for the pipeline stage that needs most."""
    stages = range(inputs.parallel.pipeline)
    accounts = [account(inputs, gigabytes, stage) for stage in stages]
    return max(accounts, key=lambda account: account.peak.total)


def fits(inputs: MemoryInputs, gigabytes: float) -> bool:
    """Return whether every phase fits a GPU of ``gigabytes`` (1e9 bytes)."""
    return worst_account(inputs, gigabytes).peak.total <= gigabytes * 1e9


@dataclass(frozen=True)
class _Need:
    """What a phase needs by itself, in bytes; the fields are those of a Phase."""

    phase: str
    trainer: float
    engine: float


def _phases(inputs: MemoryInputs, needs: Sequence[_Need], stage: int) -> list[Phase]:
    """Add to what phases need, in their order, what lies around their tensors."""
    with_cache = _phases_that_begin_with_a_cache(inputs)
    reserved = 0.0
    phases = []
    for need in needs:
        if need.phase not in with_cache:
            reserved = 0.0
        reserved = max(reserved, need.trainer + _gap_bytes(inputs, need.phase, stage))

        around = _process_bytes(inputs, need.phase) + reserved - need.trainer
        phases.append(Phase(need.phase, need.trainer, need.engine, around))
    return phases


def _process_bytes(inputs: MemoryInputs, phase: str) -> float:
    """Return what the process holds outside of torch's allocator in a phase."""
    context = CONTEXT_BYTES
    communication = COMMUNICATION_BYTES
    if phase in PHASES_BEFORE_A_FORWARD_PASS:
        context = FIRST_CONTEXT_BYTES
        communication = FIRST_COMMUNICATION_BYTES
    elif phase in PHASES_BEFORE_AN_OPTIMIZER_STEP:
        context -= OPTIMIZER_CONTEXT_BYTES

    if inputs.parallel.world_size == 1:
        return context
    return context + communication


def _gap_bytes(inputs: MemoryInputs, phase: str, stage: int) -> float:
    """Return what torch's allocator holds beyond the most that is allocated in a phase."""
    if phase not in PHASES_WITH_GAPS:
        return 0.0
    if phase in ("first_scoring", "scoring"):
        return _scoring_gap_bytes(inputs, stage)
    if phase == "update":
        # Ranks that share experts out get other numbers of rows in every layer, and blocks that were
        # freed fit less well. It grows with how unevenly that is: beyond the allowance there were 1.7
        # GB with experts on two GPUs, 5.2 and 5.6 on four, where this says 1.8, 4.6 and 3.2.
        excess = expert_load(inputs.model, inputs.parallel) - 1
        return GAP_BYTES + excess * activation_memory(inputs, stage)
    return GAP_BYTES


def _scoring_gap_bytes(inputs: MemoryInputs, stage: int) -> float:
    """Return what torch's allocator holds in scoring beyond the most that is allocated.

    Scoring computes one layer after the other, from an empty cache: what one layer leaves is what
    the next one takes, if its tensors fit there.
    """
    # A rank gets other numbers of rows for its experts in every layer. One with more than all before
    # it takes new blocks, and theirs stay: of n layers in random order 1/2 + 1/3 + ... + 1/n do.
    if inputs.parallel.expert > 1:
        layers = inputs.parallel.layers_of_stage(stage, inputs.model)
        larger_layers = sum(1 / number for number in range(2, layers + 1))
        return SCORING_GAP_SHARE * larger_layers * scoring_memory(inputs, stage)

    # Micro-batches come fullest first, and without expert parallelism experts get as many rows in every
    # layer. So only attention's blocks are kept beside those of the experts: 0.5 GB for 16,384 tokens,
    # where an H100 had 1.1 GB.
    if inputs.adapter is not None:
        return attention_blocks(inputs)
    return GAP_BYTES


def _phases_that_begin_with_a_cache(inputs: MemoryInputs) -> set[str]:
    """Return the phases at whose beginning torch holds what those before them took.

    The trainer gives it back when it is built, after a sync, before the step of an optimizer whose
    state is offloaded, and where engines share the GPU after each update.
    """
    phases = {"update"}
    if not _all_offload(inputs):
        phases.add("optimizer")
    if inputs.engine is None:
        phases.add("checkpoint")
    return phases


def _all_offload(inputs: MemoryInputs) -> bool:
    """Return whether state of every optimizer, the policy's and critics', rests on the host."""
    optimizers = [inputs.optimizer, *filter(None, inputs.auxiliary_models)]
    return all(optimizer.offload > 0 for optimizer in optimizers)


def _copied_weights(inputs: MemoryInputs, stage: int) -> float:
    """Return the bytes of the trained weights, which Megatron copies into its buffers, as they were
    before.

    Where optimizer state is offloaded they wait on the host.
    """
    if _all_offload(inputs):
        return 0.0
    return 2 * sum(trained_parameters(inputs, stage))
