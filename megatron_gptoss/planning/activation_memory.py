"""Prediction of activation memory and of the temporary tensors in a layer or the output layer."""

import math
from statistics import NormalDist

from megatron_gptoss.block_sizes import CHUNK_COLUMNS, CHUNK_TOKENS, PARTS_OF_STAGE
from megatron_gptoss.config import AdapterConfig, ModelConfig, ParallelConfig
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.parameter_counts import vocabulary_parameters

# Chosen from measurements on four H200 with 8 of 32 experts per rank, for which it predicts 10%.
# Peaks exceeded those of even loads by 2% to 9% with 4, 8 and 24 layers, and by 20% with a single
# sequence of 32,768 tokens.
EXPERT_LOAD_DEVIATION = 0.27
"""Relative standard deviation of the tokens per expert, summed over all layers.

It is for a router without load balancing.
"""

TEACHER_TOP_BYTES = 36
"""Bytes per label and token of a teacher's top k in the backward pass of the log-probs.

They are ids, log-probs and gradients.
"""


def expert_load(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the expert tokens of the fullest rank, summed over layers, relative to the mean.

    Args:
        model: architecture.
        parallel: layout.
    """
    # The mean of n experts varies by 1 / sqrt(n) of a single expert, so more experts per rank
    # balance better. Results: 1.02 for 64 of 128 experts on each of two ranks, 1.10 for 8 of 32 on
    # each of four, 1.19 for 4 of 32 on each of eight.
    ranks = parallel.expert
    if ranks == 1 or not model.num_experts:
        return 1.0

    # Expected maximum of `ranks` standard normal numbers (Blom's approximation).
    fullest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    experts_of_rank = model.num_experts / ranks
    return 1 + EXPERT_LOAD_DEVIATION * fullest / math.sqrt(experts_of_rank)


def activation_bytes(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig | None = None,
) -> float:
    """Return the bytes per token and layer that the forward pass keeps for the backward pass.

    Tokens are those of one rank, after context and tensor parallelism split them.

    Args:
        model: architecture.
        parallel: layout and recomputation.
        adapter: trained adapters; None if all parameters are trained.
    """
    hidden = model.hidden_size
    inner = model.intermediate_size
    queries = model.query_size
    keys = model.key_size

    # The residual twice, the normalized input, rotated queries and keys, the output, and the
    # log-sum-exp in fp32 (hence the 2: the sum counts values of 2 bytes).
    statistics = 2 * model.num_attention_heads
    attention: float = 3 * hidden + queries + keys + queries + statistics

    # Values: window layers keep a copy. FlashAttention keeps a view, and with it the whole QKV
    # projection.
    windowed = model.windowed_share
    attention += windowed * keys + (1 - windowed) * (queries + 2 * keys)

    # With an adapted projection the norm is a separate module, which can be recomputed. Transformer
    # Engine's fused projection contains the norm and keeps its output.
    if "layernorm" in parallel.recompute and has_separate_norm(adapter):
        attention -= hidden
    if "moe" in parallel.recompute:
        return 2 * attention

    # The input of experts is a copy, sorted by expert. A dense MLP uses the normalized input.
    mlp_input = hidden if model.num_experts else 0
    routed = mlp_input + 2 * inner
    if "moe_act" not in parallel.recompute:
        routed += inner
    mlps = model.mlps_per_token * routed * expert_load(model, parallel)
    if "layernorm" not in parallel.recompute:
        mlps += hidden
    return 2 * (attention + mlps)


def has_separate_norm(adapter: AdapterConfig | None) -> bool:
    """Return True if the norm before attention is not fused with the projection after it."""
    return adapter is not None and bool({"q", "k", "v"} & set(adapter.targets))


def activation_memory(inputs: MemoryInputs, stage: int) -> float:
    """Return the activation bytes of all micro-batches in flight.

    Args:
        inputs: models, layout and batch.
        stage: index of the pipeline stage.
    """
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
    """Return the number of micro-batches whose activations a stage holds, for all its layers."""
    parallel = inputs.parallel
    # In Megatron's schedule, every stage has begun one micro-batch more than the next stage.
    in_flight: float = parallel.pipeline - stage
    chunks = parallel.virtual_pipeline
    if chunks > 1:
        # Warm-up of Megatron's interleaved schedule, plus the current micro-batch.
        in_flight = (2 * (in_flight - 1) + (chunks - 1) * parallel.pipeline + 1) / chunks
    return min(in_flight, inputs.micro_batches)


def temporary_memory(inputs: MemoryInputs, stage: int) -> float:
    """Return the bytes of temporary tensors in the log-probs or in one layer's backward pass.

    Args:
        inputs: models, layout and batch.
        stage: index of the pipeline stage.
    """
    model = inputs.model
    parallel = inputs.parallel
    local_tokens = _local_tokens(inputs)

    routed = model.hidden_size + 4 * model.intermediate_size
    if "moe" in parallel.recompute:
        # The recomputed tensors of this layer exist during its backward pass: the experts' input
        # and both projections. Their activation, counted above, is freed by then, unless moe_act
        # discards and recomputes it.
        routed += model.hidden_size + 2 * model.intermediate_size
        if "moe_act" not in parallel.recompute:
            routed -= model.intermediate_size
    layer = 2 * local_tokens * model.mlps_per_token * expert_load(model, parallel) * routed
    if stage < parallel.pipeline - 1:
        return max(0, layer)

    # fp32 logits of a block with the bf16 gradients of this and the previous block, or the bf16
    # gradient of the weight, which Megatron's hooks receive. In addition the residual, and hidden
    # states with their gradients, of which each tensor-parallel rank has all tokens.
    block = min(CHUNK_TOKENS, inputs.tokens / parallel.context) * CHUNK_COLUMNS
    weight_gradient = _output_weight_gradient(inputs)
    states = 2 * local_tokens + 4 * local_tokens * parallel.tensor
    head = max(8 * block, weight_gradient) + states * model.hidden_size
    head += TEACHER_TOP_BYTES * inputs.teacher_top_k * inputs.tokens / parallel.context
    return max(head, layer)


def _output_weight_gradient(inputs: MemoryInputs) -> float:
    """Return the bytes of the output layer's bf16 weight gradient; 0 if it is frozen.

    If the output layer has an adapter, the merged weight is included.
    """
    vocabulary = vocabulary_parameters(inputs.model, inputs.parallel)
    if inputs.adapter is None:
        return 2 * vocabulary
    return 4 * vocabulary if "head" in inputs.adapter.targets else 0.0


def scoring_memory(inputs: MemoryInputs, stage: int) -> float:
    """Return the bytes of a forward pass without a backward pass, for one micro-batch.

    With teachers, it is the largest pass of all models.

    Args:
        inputs: models, layout and batch.
        stage: index of the pipeline stage.
    """
    scoring = _scoring_memory(inputs, inputs.model, stage)
    if not inputs.teachers:
        return scoring
    teachers = max(_scoring_memory(inputs, teacher, stage) for teacher in inputs.teachers)
    # Ids and log-probs of whole rows, in the parts of ``LogProbScorer.top_log_probs``.
    results = PARTS_OF_STAGE * inputs.parallel.pipeline * inputs.tokens
    return max(scoring, teachers + 8 * inputs.teacher_top_k * results)


def _scoring_memory(inputs: MemoryInputs, model: ModelConfig, stage: int) -> float:
    """Return the bytes of ``model``'s forward pass in ``scoring_memory``."""
    parallel = inputs.parallel
    hidden = model.hidden_size
    local_tokens = _local_tokens(inputs)

    # One layer at a time. Attention: the residual, its norm, inputs and output. Experts: the sorted
    # input, both projections, the activation and the output. Expert parallelism adds send and
    # receive buffers.
    attention = 4 * hidden + 2 * (model.query_size + 2 * model.key_size)
    routed = 3 * hidden + 3 * model.intermediate_size
    if parallel.expert > 1:
        routed += 2 * hidden
    layer = (
        2
        * local_tokens
        * (attention + model.mlps_per_token * expert_load(model, parallel) * routed)
    )
    if stage < parallel.pipeline - 1:
        return layer

    # fp32 logits of a block and a temporary of the softmax.
    block = min(CHUNK_TOKENS, inputs.tokens / parallel.context) * CHUNK_COLUMNS
    return max(layer, 8 * block + 2 * local_tokens * hidden)


def attention_blocks(inputs: MemoryInputs) -> float:
    """Return the bytes of attention's blocks that torch keeps while the layer's experts compute.

    For a forward pass without a backward pass. The blocks are those of projected and rotated
    queries, keys and values, and of the output. The tensors are freed by then, but no tensor of the
    experts fits into one of the blocks.
    """
    model = inputs.model
    per_token = 2 * (model.query_size + 2 * model.key_size) + model.query_size
    return 2 * _local_tokens(inputs) * per_token


def _local_tokens(inputs: MemoryInputs) -> float:
    """Return the tokens of a micro-batch on one rank."""
    return inputs.tokens / (inputs.parallel.context * inputs.parallel.tensor)
