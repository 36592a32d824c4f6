"""Memory of one GPU in bf16 training, predicted from the configuration alone.

It is for ``gptoss plan`` and for layouts that nobody has run yet. docs/performance.md compares it
with what was measured.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass

from megatron_gptoss.config import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_gptoss.log_probs import CHUNK_COLUMNS, CHUNK_TOKENS
from megatron_gptoss.planning.memory_inputs import EngineMemory, MemoryInputs

EXPERT_LOAD = 1.1
"""Tokens that the fullest expert-parallel rank gets, relative to the mean, where nothing balances
the router."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest pipeline stage, of all models together."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept from the forward for the backward pass, of all micro-batches in flight."""
    working: float
    """The larger of the log-probs' blocks and what one layer's backward pass needs besides."""
    fetched: float
    """Optimizer state that comes from host memory for the step and does not fit where activations
    and working memory were."""

    @property
    def resting(self) -> float:
        """What stays on the GPU between steps."""
        return sum((self.weights, self.gradients, self.optimizer))

    @property
    def total(self) -> float:
        return sum(astuple(self))


def bytes_of(dtype: str) -> int:
    """Return the bytes of one number of a dtype as OptimizerConfig names it."""
    return 2 if dtype == "bf16" else 4


def predict(inputs: MemoryInputs, stage: int = 0) -> Memory:
    """Predict what the GPUs of one pipeline stage hold."""
    activations = _activation_memory(inputs, stage)
    working = _working_memory(inputs, stage)

    gradients = 0.0
    resident_state = 0.0
    fetched = 0.0
    for trained in _trained_models(inputs, stage):
        parameters = trained.dense + trained.expert
        gradients += bytes_of(trained.optimizer.gradient_dtype) * parameters

        # Models step one after the other, so only the largest fetched state counts. It takes the
        # place of the activations, which are gone by then.
        state = _optimizer_state(trained, inputs.parallel)
        offload = trained.optimizer.offload
        resident_state += (1 - offload) * state
        fetched = max(fetched, offload * state - activations - working)

    return Memory(
        weights=_weight_memory(inputs, stage),
        gradients=gradients,
        optimizer=resident_state,
        activations=activations,
        working=working,
        fetched=fetched,
    )


def worst_stage(inputs: MemoryInputs) -> Memory:
    """Predict for the pipeline stage that needs most."""
    stages = [predict(inputs, stage) for stage in range(inputs.parallel.pipeline)]
    return max(stages, key=lambda memory: memory.total)


def fits(inputs: MemoryInputs, memory: Memory, gigabytes: float) -> bool:
    """Return whether training fits, and servers beside what the trainer keeps between steps."""
    engine = inputs.engine or EngineMemory(awake_fraction=0.0, asleep_bytes=0, sync_bytes=0)
    training = memory.total + engine.asleep_bytes
    generating = memory.resting + engine.awake_fraction * gigabytes * 1e9
    return max(training, generating) <= gigabytes * 1e9


def parameters_per_gpu(
    model: ModelConfig,
    parallel: ParallelConfig,
    stage: int = 0,
) -> tuple[float, float]:
    """Return (dense, expert) parameters of one rank of a pipeline stage."""
    layers = parallel.layers_of_stage(stage, model)
    hidden = model.hidden_size

    # Linears that tensor parallelism splits, then what every rank has: the output projection's
    # bias, sinks, two norms and the router.
    projections = (hidden + 1) * (model.query_size + 2 * model.key_size) / parallel.tensor
    output_projection = (model.query_size / parallel.tensor + 1) * hidden
    attention = projections + output_projection
    router = (hidden + 1) * model.num_experts
    dense = layers * (attention + model.num_attention_heads + 2 * hidden + router)

    vocabulary = _vocabulary_parameters(model, parallel)
    first = vocabulary if stage == 0 else 0
    last = vocabulary + hidden if stage == parallel.pipeline - 1 else 0
    dense += first + last

    expert = layers * model.num_experts / parallel.expert * model.expert_parameters
    return dense, expert


def activation_bytes(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the bytes per token and layer that the forward pass keeps.

    Tokens are counted as they are spread over context- and tensor-parallel ranks.
    """
    hidden = model.hidden_size
    inner = model.intermediate_size
    queries = model.query_size
    keys = model.key_size

    # The residual twice and the normed input; rotated queries and keys, values inside the whole
    # projection, the output and its statistics.
    statistics = 2 * model.num_attention_heads
    attention = 3 * hidden + (queries + keys + (queries + 4 * keys) / 2 + queries + statistics)
    if "moe" in parallel.recompute:
        return 2 * attention

    routed = hidden + 2 * inner
    if "moe_act" not in parallel.recompute:
        routed += inner
    experts = model.experts_per_token * routed * EXPERT_LOAD
    if "layernorm" not in parallel.recompute:
        experts += hidden
    return 2 * (attention + experts)


def _activation_memory(inputs: MemoryInputs, stage: int) -> float:
    """Return what is kept for the backward pass, of all micro-batches in flight."""
    model = inputs.model
    parallel = inputs.parallel

    layers = parallel.layers_of_stage(stage, model)
    recomputing_layers = layers
    if parallel.recompute_layers is not None:
        recomputing_layers = min(layers, parallel.virtual_pipeline * parallel.recompute_layers)
    without_recompute = parallel.model_copy(update={"recompute": ()})
    keeping = (layers - recomputing_layers) * activation_bytes(model, without_recompute)
    per_token = recomputing_layers * activation_bytes(model, parallel) + keeping

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
    layer = 2 * local_tokens * model.experts_per_token * EXPERT_LOAD * routed
    if stage < parallel.pipeline - 1:
        return max(0, layer)

    # A block's fp32 logits, its bf16 gradient and that of the block before; or the bf16 gradient
    # of the weight that Megatron's hooks are shown. Beside them hidden states and their gradients.
    block = min(CHUNK_TOKENS, inputs.tokens / parallel.context) * CHUNK_COLUMNS
    vocabulary = _vocabulary_parameters(model, parallel)
    head = max(8 * block, 2 * vocabulary) + 6 * local_tokens * model.hidden_size
    return max(head, layer)


@dataclass(frozen=True)
class _TrainedModel:
    """A model with an optimizer: the policy, or a critic."""

    optimizer: OptimizerConfig
    dense: float
    """Parameters of one rank."""
    expert: float
    """Parameters of one rank."""


def _trained_models(inputs: MemoryInputs, stage: int) -> Iterator[_TrainedModel]:
    dense, expert = parameters_per_gpu(inputs.model, inputs.parallel, stage)
    yield _TrainedModel(inputs.optimizer, dense, expert)

    # A critic has no vocabulary to predict.
    is_last = stage == inputs.parallel.pipeline - 1
    if is_last:
        dense -= _vocabulary_parameters(inputs.model, inputs.parallel)
    for optimizer in inputs.auxiliary_models:
        if optimizer is not None:
            yield _TrainedModel(optimizer, dense, expert)


def _weight_memory(inputs: MemoryInputs, stage: int) -> float:
    """Return the bf16 weights of all models."""
    dense, expert = parameters_per_gpu(inputs.model, inputs.parallel, stage)
    # Every auxiliary model has the policy's architecture and layout.
    weights = 2 * (dense + expert) * (1 + len(inputs.auxiliary_models))

    if stage == inputs.parallel.pipeline - 1:
        critics = [optimizer for optimizer in inputs.auxiliary_models if optimizer is not None]
        for _ in critics:
            weights -= 2 * _vocabulary_parameters(inputs.model, inputs.parallel)
    return weights


def _optimizer_state(trained: _TrainedModel, parallel: ParallelConfig) -> float:
    """Return the bytes of the optimizer's state, which data-parallel ranks share out."""
    dense_shards = parallel.world_size // (parallel.tensor * parallel.pipeline)
    expert_shards = parallel.world_size // (parallel.pipeline * parallel.expert)

    # The 16 bits that complete a bf16 weight to fp32, and two moments.
    per_parameter = 2 + 2 * bytes_of(trained.optimizer.moment_dtype)
    return per_parameter * (trained.dense / dense_shards + trained.expert / expert_shards)


def _local_tokens(inputs: MemoryInputs) -> float:
    return inputs.tokens / (inputs.parallel.context * inputs.parallel.tensor)


def _vocabulary_parameters(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the parameters of one rank's embedding or output layer."""
    return model.vocab_size * model.hidden_size / parallel.tensor
