"""Memory that computing takes: activations kept for the backward pass, and what a layer or the
output layer needs while it computes."""

import math
from statistics import NormalDist

from megatron_gptoss.block_sizes import CHUNK_COLUMNS, CHUNK_TOKENS
from megatron_gptoss.config import AdapterConfig, ModelConfig, ParallelConfig
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.parameter_counts import vocabulary_parameters

EXPERT_SPREAD = 0.27
"""Standard deviation, relative to the mean, of what one expert gets of the tokens of all layers, where
nothing balances the router. With it the fullest of four ranks that have 8 of 32 experts each keeps 10 %
more than the mean. By how far peaks on four H200 were above what even loads would have taken, it was 2
to 9 %, with 4, 8 and 24 layers, and 20 % where a micro-batch was one sequence of 32,768 tokens."""


def expert_load(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the tokens that the fullest rank gets for its experts in all layers, relative to the mean.

    The more experts a rank has, the more evenly it is used, because some have many tokens where others
    have few. The mean of n experts spreads by 1 / sqrt(n) of what one does, and of r ranks one is the
    fullest: 2 % with 64 of the 120B's 128 experts on each of two, 10 % with 8 of 32 on each of four,
    19 % with 4 of 32 on each of eight.
    """
    ranks = parallel.expert
    if ranks == 1 or not model.num_experts:
        return 1.0

    # The expected maximum of as many standard normal numbers (Blom's approximation).
    fullest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    experts_of_rank = model.num_experts / ranks
    return 1 + EXPERT_SPREAD * fullest / math.sqrt(experts_of_rank)


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
    mlps = model.mlps_per_token * routed * expert_load(model, parallel)
    if "layernorm" not in parallel.recompute:
        mlps += hidden
    return 2 * (attention + mlps)


def has_separate_norm(adapter: AdapterConfig | None) -> bool:
    """Return whether the norm before attention is not a part of the projection behind it."""
    return adapter is not None and bool({"q", "k", "v"} & set(adapter.targets))


def activation_memory(inputs: MemoryInputs, stage: int) -> float:
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


def working_memory(inputs: MemoryInputs, stage: int) -> float:
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
    layer = 2 * local_tokens * model.mlps_per_token * expert_load(model, parallel) * routed
    if stage < parallel.pipeline - 1:
        return max(0, layer)

    # A block's fp32 logits, its bf16 gradient and that of the block before; or the bf16 gradient
    # of the weight that Megatron's hooks are shown. Beside them the residual, and hidden states and
    # their gradients, which every tensor-parallel rank has of all tokens.
    block = min(CHUNK_TOKENS, inputs.tokens / parallel.context) * CHUNK_COLUMNS
    weight_gradient = _output_weight_gradient(inputs)
    states = 2 * local_tokens + 4 * local_tokens * parallel.tensor
    head = max(8 * block, weight_gradient) + states * model.hidden_size
    return max(head, layer)


def _output_weight_gradient(inputs: MemoryInputs) -> float:
    """Return the bf16 gradient of the output layer's weight; none if it is frozen, and with an
    adapter of its own also the merged weight."""
    vocabulary = vocabulary_parameters(inputs.model, inputs.parallel)
    if inputs.adapter is None:
        return 2 * vocabulary
    return 4 * vocabulary if "head" in inputs.adapter.targets else 0.0


def scoring_memory(inputs: MemoryInputs, stage: int) -> float:
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
    layer = (
        2
        * local_tokens
        * (attention + model.mlps_per_token * expert_load(model, parallel) * routed)
    )
    if stage < parallel.pipeline - 1:
        return layer

    # A block's fp32 logits, and what the softmax makes of them.
    block = min(CHUNK_TOKENS, inputs.tokens / parallel.context) * CHUNK_COLUMNS
    return max(layer, 8 * block + 2 * local_tokens * hidden)


def attention_blocks(inputs: MemoryInputs) -> float:
    """Return what torch's allocator keeps of a layer's attention while the layer's experts compute,
    in a forward pass without a backward pass.

    Queries, keys and values as they were projected and once more as they were rotated, and the
    output. They are gone by then, but no tensor of the experts fits into one of their blocks.
    """
    model = inputs.model
    per_token = 2 * (model.query_size + 2 * model.key_size) + model.query_size
    return 2 * _local_tokens(inputs) * per_token


def _local_tokens(inputs: MemoryInputs) -> float:
    return inputs.tokens / (inputs.parallel.context * inputs.parallel.tensor)
