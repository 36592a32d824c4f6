"""Prediction of the memory that a weight sync needs on a trainer GPU."""

from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.parameter_counts import MXFP4_BYTES

STACK_BYTES = 1 << 28
"""Maximum bytes of adjacent MXFP4 experts in one message (``converters.gathering_plan``)."""


def sent_tensor_bytes(inputs: MemoryInputs) -> float:
    """Return the bytes of Hugging Face tensors on a sending rank: two buckets.

    One bucket is sent while the next one is filled.
    """
    # A tensor is never split, and it contains all experts of a layer. In bf16, the gate and up
    # projections of the 120B model have 4.2 GB, and the down projections that follow have 2.1 GB.
    assert inputs.engine is not None
    limit = inputs.engine.bucket_bytes
    model = inputs.model

    element = MXFP4_BYTES if inputs.engine.has_mxfp4_experts else 2.0
    down_projections = element * model.num_experts * model.intermediate_size * model.hidden_size
    gate_and_up_projections = 2 * down_projections

    # The tensors before and after: the embedding precedes the experts of the first layer, and the
    # output layer follows those of the last layer. A rank that has these unsplit sends its own
    # parameter and needs no buffer.
    adjacent_bytes = max(down_projections, _split_vocabulary_bytes(inputs))
    in_flight = max(limit, gate_and_up_projections) + max(limit, adjacent_bytes)

    # A small model fits into the buckets as a whole.
    return min(in_flight, 2 * model.num_parameters)


def arriving_bytes(inputs: MemoryInputs) -> float:
    """Return the bytes of the buffer in which a sending rank receives parts from other ranks.

    It holds one parameter, or several adjacent experts in MXFP4.
    """
    assert inputs.engine is not None
    model = inputs.model

    expert_bytes = 0.0
    if inputs.parallel.expert > 1:
        expert_bytes = 2 * 2 * model.intermediate_size * model.hidden_size
        if inputs.engine.has_mxfp4_experts:
            expert_bytes = STACK_BYTES
    return max(expert_bytes, _split_vocabulary_bytes(inputs))


def _split_vocabulary_bytes(inputs: MemoryInputs) -> float:
    """Return the bytes of the whole embedding or output layer; 0 if each rank has both unsplit."""
    parallel = inputs.parallel
    if parallel.tensor == 1 and parallel.pipeline == 1:
        return 0.0
    return 2 * inputs.model.vocab_size * inputs.model.hidden_size
