"""Memory that a weight sync takes of a trainer GPU."""

from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.parameter_counts import MXFP4_BYTES

STACK_BYTES = 1 << 28
"""The most of neighbouring MXFP4 experts that one message between ranks brings
(``converters.gathering_plan``)."""


def sent_tensor_bytes(inputs: MemoryInputs) -> float:
    """Return the bytes of the Hugging Face tensors that a sending rank makes and holds at a time: those
    of the bucket that is sent, and of the next one, which is made meanwhile.

    A Hugging Face tensor goes as a whole, however large it is, and has all experts of a layer: gate and
    up projections of the 120B are 4.2 GB in bf16, and its down projections, which follow them, 2.1.
    """
    assert inputs.engine is not None
    limit = inputs.engine.bucket_bytes
    model = inputs.model

    element = MXFP4_BYTES if inputs.engine.packs_experts else 2.0
    down_projections = element * model.num_experts * model.intermediate_size * model.hidden_size
    gate_and_up_projections = 2 * down_projections

    # They follow the embedding in the first layer, and the output layer follows the last one's. A rank
    # that has these as a whole sends its parameter itself.
    neighbour = max(down_projections, _split_vocabulary_bytes(inputs))
    under_way = max(limit, gate_and_up_projections) + max(limit, neighbour)

    # A small model is sent at once.
    return min(under_way, 2 * model.num_parameters)


def arriving_bytes(inputs: MemoryInputs) -> float:
    """Return the bytes of the buffer in which a sending rank receives what others hold: of one
    parameter at a time, or of some neighbouring experts in MXFP4."""
    assert inputs.engine is not None
    model = inputs.model

    of_experts = 0.0
    if inputs.parallel.expert > 1:
        of_experts = 2 * 2 * model.intermediate_size * model.hidden_size
        if inputs.engine.packs_experts:
            of_experts = STACK_BYTES
    return max(of_experts, _split_vocabulary_bytes(inputs))


def _split_vocabulary_bytes(inputs: MemoryInputs) -> float:
    """Return the bytes of the whole embedding, or output layer, if no rank has both of them."""
    parallel = inputs.parallel
    if parallel.tensor == 1 and parallel.pipeline == 1:
        return 0.0
    return 2 * inputs.model.vocab_size * inputs.model.hidden_size
