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

CONTEXT_BYTES = 2.7e9
"""What a process holds of its GPU outside of torch's allocator: CUDA's context, libraries and their
workspaces, kernels, from the first forward pass on, on one H200."""

FIRST_CONTEXT_BYTES = 1.3e9
"""The same before the first forward pass."""

PHASES_BEFORE_A_FORWARD_PASS = ("start", "sync")
"""A run begins with a weight sync, which is the fullest: servers hold all that they allocate when
they start, and in later ones only their weights."""

COMMUNICATION_BYTES = 1.5e9
"""NCCL's buffers where there is more than one rank. An allowance, not measured by itself: Megatron
has a communicator for each of its groups, and each takes some when it is first used."""

GAP_BYTES = 3.2e9
"""What torch's allocator holds beyond the most that is allocated, in phases that allocate and free
blocks of many sizes. 2.5, 2.9 and 4.2 GB on one H200 beside 82, 67 and 47 GB of tensors, with
16,384 tokens; none while weights and gradients were made.

The 4.2 GB, in scoring, are older than layers that keep no tensor of the tokens after their forward
pass: every layer had a small one in a block of the update before, which torch could not give back.
Scoring in full training was not measured again, so that it has the whole allowance; with adapters,
see ``_gap_bytes``."""

PHASES_WITH_GAPS = ("scoring", "update", "optimizer", "checkpoint")
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
    engine = inputs.engine or EngineMemory(awake_fraction=0.0, asleep_bytes=0, sync_bytes=0)
    awake = engine.awake_fraction * gigabytes * 1e9
    asleep = engine.asleep_bytes

    # Nothing has been merged, rounded or dequantized yet at the start; in the optimizer's step the
    # memory for it is still there.
    own_weights = memory.weights - shared_weight_bytes(inputs)
    start = own_weights + memory.gradients + _copied_weights(inputs, stage)
    stepping = memory.resting + fetched + dequantized_bytes(inputs)

    needs = [_Need("start", start, 0)]
    if inputs.engine is not None:
        needs += [
            _Need("sync", memory.resting, awake - engine.working_bytes + engine.sync_bytes),
            _Need("rollout", memory.resting, awake),
        ]
    needs += [
        _Need("scoring", memory.resting + scoring_memory(inputs, stage), asleep),
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
        phases=_phases(inputs, needs),
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


def _phases(inputs: MemoryInputs, needs: Sequence[_Need]) -> list[Phase]:
    """Add to what phases need, in their order, what lies around their tensors."""
    communication = COMMUNICATION_BYTES if inputs.parallel.world_size > 1 else 0.0
    with_cache = _phases_that_begin_with_a_cache(inputs)
    reserved = 0.0
    phases = []
    for need in needs:
        if need.phase not in with_cache:
            reserved = 0.0
        reserved = max(reserved, need.trainer + _gap_bytes(inputs, need.phase))

        is_early = need.phase in PHASES_BEFORE_A_FORWARD_PASS
        context = FIRST_CONTEXT_BYTES if is_early else CONTEXT_BYTES
        around = context + communication + reserved - need.trainer
        phases.append(Phase(need.phase, need.trainer, need.engine, around))
    return phases


def _gap_bytes(inputs: MemoryInputs, phase: str) -> float:
    """Return what torch's allocator holds beyond the most that is allocated in a phase."""
    if phase not in PHASES_WITH_GAPS:
        return 0.0

    # Scoring computes one layer after the other, from an empty cache: what one layer leaves is what
    # the next one takes, if its tensors have the same sizes. Micro-batches come fullest first, and
    # without expert parallelism experts get as many rows in every layer. So only attention's blocks
    # are kept beside those of the experts: 0.5 GB for 16,384 tokens, where an H100 had 1.1 GB.
    if phase == "scoring" and inputs.adapter is not None and inputs.parallel.expert == 1:
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
