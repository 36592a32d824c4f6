"""Memory that a weight sync takes of a trainer GPU."""

from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.parameter_counts import MXFP4_BYTES

STACK_BYTES = 1 << 28
"""The most of neighbouring MXFP4 experts that one message between ranks brings
(``converters.gathering_plan``)."""


def sent_tensor_bytes(inputs: MemoryInputs) -> float:
    """Return the bytes of the Hugging Face tensors that a sending rank holds at a time: those of the
    bucket that is sent, and of the next one, which is made meanwhile.

    A Hugging Face tensor goes as a whole, however large it is, and has all experts of a layer: gate and
    up projections of the 120B are 4.2 GB in bf16, and its down projections, which follow them, 2.1.
    """
    assert inputs.engine is not None
    limit = inputs.engine.bucket_bytes
    model = inputs.model

    element: float = 2
    if inputs.engine.packs_experts:
        element = MXFP4_BYTES
    down_projections = element * model.num_experts * model.intermediate_size * model.hidden_size
    gate_and_up_projections = 2 * down_projections

    embedding = 2 * model.vocab_size * model.hidden_size
    largest = max(gate_and_up_projections, embedding)
    under_way = max(limit, largest) + max(limit, down_projections)
    # A small model is sent at once.
    return min(under_way, 2 * model.num_parameters)


def arriving_bytes(inputs: MemoryInputs) -> float:
    """Return the bytes of the buffer in which a sending rank receives what others hold: of one
    parameter at a time, or of some neighbouring experts in MXFP4."""
    assert inputs.engine is not None
    model = inputs.model
    parallel = inputs.parallel

    arriving = 0.0
    if parallel.tensor > 1 or parallel.pipeline > 1:
        # Shards of all ranks together, and what is on the first or the last stage only.
        arriving = 2 * model.vocab_size * model.hidden_size
    if parallel.expert > 1:
        of_experts = 2 * 2 * model.intermediate_size * model.hidden_size
        if inputs.engine.packs_experts:
            of_experts = STACK_BYTES
        arriving = max(arriving, of_experts)
    return arriving
