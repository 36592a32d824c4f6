"""Memory of one GPU over a step of bf16 training, predicted from the configuration alone.

It is for ``gptoss plan``, for layouts that nobody has run yet, and for the ``memory/*`` metrics of
a run, which show it beside what was measured. docs/performance.md compares it with measurements and
says which constants were measured where.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from megatron_gptoss.config import AdapterConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_gptoss.log_probs import CHUNK_COLUMNS, CHUNK_TOKENS
from megatron_gptoss.optimizer_offload import PART_ELEMENTS
from megatron_gptoss.planning.memory_inputs import EngineMemory, MemoryInputs

EXPERT_LOAD = 1.1
"""Tokens that the fullest expert-parallel rank gets, relative to the mean, where nothing balances
the router."""

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
16,384 tokens; none while weights and gradients were made."""

PHASES_WITH_GAPS = ("scoring", "update", "optimizer", "checkpoint")
"""Phases to which GAP_BYTES apply. A sync's buffers are few and large; their sizes are counted."""

MXFP4_BYTES = 17 / 32
"""Of one value in MXFP4: four bits, and a scale for every 32."""

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


def expert_load(parallel: ParallelConfig) -> float:
    """Return the tokens of the fullest rank's experts, relative to the mean."""
    return EXPERT_LOAD if parallel.expert > 1 else 1.0


def bytes_of(dtype: str) -> int:
    """Return the bytes of one number of a dtype as OptimizerConfig names it."""
    return 2 if dtype == "bf16" else 4


def predict(inputs: MemoryInputs, stage: int = 0) -> Memory:
    """Predict what the GPUs of one pipeline stage hold in the update."""
    activations = _activation_memory(inputs, stage)
    working = _working_memory(inputs, stage)

    gradients = 0.0
    resident_state = 0.0
    fetched = 0.0
    for trained in _trained_models(inputs, stage):
        parameters = trained.dense + trained.expert
        gradients += bytes_of(trained.optimizer.gradient_dtype) * parameters
        resident_state += (1 - trained.optimizer.offload) * _optimizer_state(
            trained, inputs.parallel
        )

        # A part of the state takes the place of the activations, which are gone by then. Models
        # step one after the other, so only the largest part counts.
        fetched = max(fetched, _fetched_state(inputs, trained) - activations - working)

    return Memory(
        weights=_weight_memory(inputs, stage),
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
    fetched = max(_fetched_state(inputs, trained) for trained in _trained_models(inputs, stage))
    engine = inputs.engine or EngineMemory(awake_fraction=0.0, asleep_bytes=0, sync_bytes=0)
    awake = engine.awake_fraction * gigabytes * 1e9
    asleep = engine.asleep_bytes

    needs = [_Need("start", memory.weights + memory.gradients + _copied_weights(inputs, stage), 0)]
    if inputs.engine is not None:
        needs += [
            _Need("sync", memory.resting, awake - engine.working_bytes + engine.sync_bytes),
            _Need("rollout", memory.resting, awake),
        ]
    needs += [
        _Need("scoring", memory.resting + _scoring_memory(inputs, stage), asleep),
        _Need("update", memory.resting + memory.activations + memory.working, asleep),
        _Need("optimizer", memory.resting + fetched, asleep),
        _Need("checkpoint", memory.resting + _gathered_for_checkpoint(inputs), asleep),
    ]

    host = 0.0
    for trained in _trained_models(inputs, stage):
        state = _optimizer_state(trained, inputs.parallel)
        host += HOST_ROUNDING * trained.optimizer.offload * state
    return Account(memory=memory, phases=_phases(inputs, needs), host=host)


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
        gaps = GAP_BYTES if need.phase in PHASES_WITH_GAPS else 0.0
        reserved = max(reserved, need.trainer + gaps)

        is_early = need.phase in PHASES_BEFORE_A_FORWARD_PASS
        context = FIRST_CONTEXT_BYTES if is_early else CONTEXT_BYTES
        around = context + communication + reserved - need.trainer
        phases.append(Phase(need.phase, need.trainer, need.engine, around))
    return phases


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
    return 2 * sum(_trained_parameters(inputs, stage))


def parameters_per_gpu(
    model: ModelConfig,
    parallel: ParallelConfig,
    stage: int = 0,
) -> tuple[float, float]:
    """Return (dense, expert) parameters of one rank of a pipeline stage."""
    layers = parallel.layers_of_stage(stage, model)
    dense = layers * model.layer_parameters(parallel.tensor)
    if stage == 0:
        dense += _vocabulary_parameters(model, parallel)
    if stage == parallel.pipeline - 1:
        dense += _head_parameters(model, parallel) + model.hidden_size

    expert = layers * model.num_experts / parallel.expert * model.expert_parameters
    return dense, expert


def trained_parameters_per_gpu(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig | None,
    stage: int = 0,
) -> tuple[float, float]:
    """Return (dense, expert) parameters of one rank of a pipeline stage that are trained: those of
    the adapters, or all."""
    if adapter is None:
        return parameters_per_gpu(model, parallel, stage)
    return adapter_parameters_per_gpu(model, parallel, adapter, stage)


def adapter_parameters_per_gpu(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig,
    stage: int = 0,
) -> tuple[float, float]:
    """Return (dense, expert) parameters of the adapters of one rank of a pipeline stage."""
    layers = parallel.layers_of_stage(stage, model)
    of_layer, of_expert = adapter.layer_parameters(model, parallel.tensor)
    dense = layers * of_layer
    if stage == 0:
        dense += adapter.vocabulary_parameters(model, "embedding", parallel.tensor)
    if stage == parallel.pipeline - 1:
        dense += adapter.vocabulary_parameters(model, "head", parallel.tensor)
    return dense, layers * model.num_experts / parallel.expert * of_expert


def _trained_parameters(inputs: MemoryInputs, stage: int) -> tuple[float, float]:
    return trained_parameters_per_gpu(inputs.model, inputs.parallel, inputs.adapter, stage)


def merged_weight_bytes(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the bytes of the memory in which the experts of a rank are dequantized and merged, or
    rounded to MXFP4. All layers share it; gate and up projections, and down projections, have a part each."""
    experts = model.num_experts / parallel.expert
    return 2 * experts * 3 * model.intermediate_size * model.hidden_size


def activation_bytes(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig | None = None,
) -> float:
    """Return the bytes per token and layer that the forward pass keeps.

    Tokens are counted as they are spread over context- and tensor-parallel ranks.
    """
    hidden = model.hidden_size
    inner = model.intermediate_size
    queries = model.query_size
    keys = model.key_size

    # The residual twice and the normed input; rotated queries and keys, the output and its
    # statistics.
    statistics = 2 * model.num_attention_heads
    attention: float = 3 * hidden + queries + keys + queries + statistics

    # Values: a copy in layers with a window; in the others a part of the whole projection, as
    # FlashAttention keeps it.
    windowed = model.windowed_share
    attention += windowed * keys + (1 - windowed) * (queries + 2 * keys)

    # An adapted projection leaves the norm before it a module of its own, which is recomputed.
    # Transformer Engine's projection includes it, and keeps what it gave.
    if "layernorm" in parallel.recompute and has_separate_norm(adapter):
        attention -= hidden
    if "moe" in parallel.recompute:
        return 2 * attention

    # The input of an expert is a copy, in the experts' order; that of one MLP is the normed input.
    mlp_input = hidden if model.num_experts else 0
    routed = mlp_input + 2 * inner
    if "moe_act" not in parallel.recompute:
        routed += inner
    mlps = model.mlps_per_token * routed * expert_load(parallel)
    if "layernorm" not in parallel.recompute:
        mlps += hidden
    return 2 * (attention + mlps)


def has_separate_norm(adapter: AdapterConfig | None) -> bool:
    """Return whether the norm before attention is not a part of the projection behind it."""
    return adapter is not None and bool({"q", "k", "v"} & set(adapter.targets))


def _activation_memory(inputs: MemoryInputs, stage: int) -> float:
    """Return what is kept for the backward pass, of all micro-batches in flight."""
    model = inputs.model
    parallel = inputs.parallel

    layers = parallel.layers_of_stage(stage, model)
    recomputing_layers = layers
    if parallel.recompute_layers is not None:
        recomputing_layers = min(layers, parallel.virtual_pipeline * parallel.recompute_layers)
    without_recompute = parallel.model_copy(update={"recompute": ()})
    adapter = inputs.adapter
    keeping = (layers - recomputing_layers) * activation_bytes(model, without_recompute, adapter)
    per_token = recomputing_layers * activation_bytes(model, parallel, adapter) + keeping

    return _micro_batches_in_flight(inputs, stage) * _local_tokens(inputs) * per_token


def _micro_batches_in_flight(inputs: MemoryInputs, stage: int) -> float:
    """Return of how many micro-batches a stage holds the activations of all its layers."""
    parallel = inputs.parallel
    in_flight: float = parallel.pipeline - stage
    chunks = parallel.virtual_pipeline
    if chunks > 1:
        # As Megatron's interleaved schedule warms up, and one more.
        in_flight = (2 * (in_flight - 1) + (chunks - 1) * parallel.pipeline + 1) / chunks
    return min(in_flight, inputs.micro_batches)


def _working_memory(inputs: MemoryInputs, stage: int) -> float:
    """Return what the log-probs or one layer's backward pass need for themselves."""
    model = inputs.model
    parallel = inputs.parallel
    local_tokens = _local_tokens(inputs)

    routed = model.hidden_size + 4 * model.intermediate_size
    if "moe" in parallel.recompute:
        # What other settings keep of every layer is there while this one's backward pass reads it:
        # the experts' input and both projections. Their activation, counted above, is gone by then,
        # unless it was discarded and made once more.
        routed += model.hidden_size + 2 * model.intermediate_size
        if "moe_act" not in parallel.recompute:
            routed -= model.intermediate_size
    layer = 2 * local_tokens * model.mlps_per_token * expert_load(parallel) * routed
    if stage < parallel.pipeline - 1:
        return max(0, layer)

    # A block's fp32 logits, its bf16 gradient and that of the block before; or the bf16 gradient
    # of the weight that Megatron's hooks are shown. Beside them hidden states and their gradients.
    block = min(CHUNK_TOKENS, inputs.tokens / parallel.context) * CHUNK_COLUMNS
    weight_gradient = _output_weight_gradient(inputs)
    head = max(8 * block, weight_gradient) + 6 * local_tokens * model.hidden_size
    return max(head, layer)


def _output_weight_gradient(inputs: MemoryInputs) -> float:
    """Return the bf16 gradient of the output layer's weight; none if it is frozen, and with an
    adapter of its own also the merged weight."""
    vocabulary = _vocabulary_parameters(inputs.model, inputs.parallel)
    if inputs.adapter is None:
        return 2 * vocabulary
    return 4 * vocabulary if "head" in inputs.adapter.targets else 0.0


def _scoring_memory(inputs: MemoryInputs, stage: int) -> float:
    """Return what a forward pass without a backward pass needs, for one micro-batch."""
    model = inputs.model
    parallel = inputs.parallel
    hidden = model.hidden_size
    local_tokens = _local_tokens(inputs)

    # One layer at a time: the residual, its norm, attention's inputs and output; the experts' input
    # in their order, both projections, the activation and their output. What is sent to other ranks
    # and what comes from them exist beside these.
    attention = 4 * hidden + 2 * (model.query_size + 2 * model.key_size)
    routed = 3 * hidden + 3 * model.intermediate_size
    if parallel.expert > 1:
        routed += 2 * hidden
    layer = 2 * local_tokens * (attention + model.mlps_per_token * expert_load(parallel) * routed)
    if stage < parallel.pipeline - 1:
        return layer

    # A block's fp32 logits, and what the softmax makes of them.
    block = min(CHUNK_TOKENS, inputs.tokens / parallel.context) * CHUNK_COLUMNS
    return max(layer, 8 * block + 2 * local_tokens * hidden)


def _gathered_for_checkpoint(inputs: MemoryInputs) -> float:
    """Return what Megatron gathers of the largest parameter's state at a time, in fp32: every
    rank's share, and its own once more."""
    shares = inputs.parallel.data * inputs.parallel.context
    model = inputs.model
    if inputs.adapter is None:
        largest = max(_vocabulary_parameters(model, inputs.parallel), model.expert_parameters)
    else:
        widest = max(model.query_size, model.hidden_size)
        largest = widest * inputs.adapter.rank
        if "experts" in inputs.adapter.targets:
            # One parameter of all experts of the rank.
            experts = model.num_experts / inputs.parallel.expert
            of_expert = max(model.hidden_size, 2 * model.intermediate_size)
            expert_rank = inputs.adapter.rank_of_experts(model)
            largest = max(largest, experts * of_expert * expert_rank)
    return 4 * largest * (1 + 1 / shares)


@dataclass(frozen=True)
class _TrainedModel:
    """A model with an optimizer: the policy, or a critic."""

    optimizer: OptimizerConfig
    dense: float
    """Parameters of one rank."""
    expert: float
    """Parameters of one rank."""


def _trained_models(inputs: MemoryInputs, stage: int) -> Iterator[_TrainedModel]:
    dense, expert = _trained_parameters(inputs, stage)
    yield _TrainedModel(inputs.optimizer, dense, expert)

    # A critic has no vocabulary to predict.
    is_last = stage == inputs.parallel.pipeline - 1
    if is_last and inputs.adapter is None:
        dense -= _head_parameters(inputs.model, inputs.parallel)
    for optimizer in inputs.auxiliary_models:
        if optimizer is not None:
            yield _TrainedModel(optimizer, dense, expert)


def _weight_memory(inputs: MemoryInputs, stage: int) -> float:
    """Return the weights of all models, and the memory that merged or rounded ones share."""
    # Every auxiliary model has the policy's architecture, layout and adapters.
    weights = _model_weights(inputs, stage) * (1 + len(inputs.auxiliary_models))
    if inputs.adapter is not None or inputs.quantization is not None:
        weights += merged_weight_bytes(inputs.model, inputs.parallel)

    if stage == inputs.parallel.pipeline - 1:
        critics = [optimizer for optimizer in inputs.auxiliary_models if optimizer is not None]
        for _ in critics:
            weights -= 2 * _head_parameters(inputs.model, inputs.parallel)
    return weights


def _model_weights(inputs: MemoryInputs, stage: int) -> float:
    """Return one model's weights: bf16, but for experts that are frozen in MXFP4."""
    model = inputs.model
    parallel = inputs.parallel
    weights = 2 * sum(parameters_per_gpu(model, parallel, stage))
    if inputs.adapter is None:
        return weights

    weights += 2 * sum(adapter_parameters_per_gpu(model, parallel, inputs.adapter, stage))
    if parallel.base == "mxfp4":
        experts = parallel.layers_of_stage(stage, model) * model.num_experts / parallel.expert
        matrices = experts * 3 * model.hidden_size * model.intermediate_size
        weights -= (2 - MXFP4_BYTES) * matrices
    return weights


def _optimizer_state(trained: _TrainedModel, parallel: ParallelConfig) -> float:
    """Return the bytes of the optimizer's state, which data-parallel ranks share out."""
    dense_shards = parallel.world_size // (parallel.tensor * parallel.pipeline)
    expert_shards = parallel.world_size // (parallel.pipeline * parallel.expert)

    shares = trained.dense / dense_shards + trained.expert / expert_shards
    return _bytes_per_parameter(trained) * shares


def _bytes_per_parameter(trained: _TrainedModel) -> int:
    """Return the bytes of optimizer state: the 16 bits that complete a bf16 weight to fp32, and two
    moments."""
    return 2 + 2 * bytes_of(trained.optimizer.moment_dtype)


def _fetched_state(inputs: MemoryInputs, trained: _TrainedModel) -> float:
    """Return the bytes of the offloaded state that is on the GPU at a time."""
    parallel = inputs.parallel
    dense_shards = parallel.world_size // (parallel.tensor * parallel.pipeline)
    largest_parameter = _vocabulary_parameters(inputs.model, parallel) / dense_shards
    part = _bytes_per_parameter(trained) * max(PART_ELEMENTS, largest_parameter)
    return min(part, trained.optimizer.offload * _optimizer_state(trained, parallel))


def _local_tokens(inputs: MemoryInputs) -> float:
    return inputs.tokens / (inputs.parallel.context * inputs.parallel.tensor)


def _vocabulary_parameters(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the parameters of one rank's embedding or output layer."""
    return model.vocab_size * model.hidden_size / parallel.tensor


def _head_parameters(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the parameters of the last stage's output layer; none where it is the embedding.

    A last stage that does not have the embedding has a copy of it.
    """
    if model.tied_embeddings and parallel.pipeline == 1:
        return 0.0
    return _vocabulary_parameters(model, parallel)
