"""How much arithmetic a training step is, and how much a GPU can do.

Behind every TFLOP/s and MFU reported.
"""

from collections.abc import Iterable, Sequence

from megatron_gptoss.config import ModelConfig

MATMUL_CEILING = 780e12
"""FLOP/s of a large bf16 matrix product on an H200, as ``matmul_ceiling`` measures it: what a
predicted MFU is a share of."""


def attended_pairs(length: int, window: int | None = None) -> int:
    """Count the (query, key) pairs of one causal sequence.

    With a window each query sees so many keys, itself included.
    """
    full = min(length, window or length)
    return full * (full + 1) // 2 + (length - full) * full


def forward_flops(model: ModelConfig, lengths: Iterable[int]) -> int:
    """Count the floating-point operations of a forward pass over packed sequences.

    2 per multiply-add of every matrix product. Counted: attention projections, query-key and
    probability-value products of the pairs that causality and window leave, router, the chosen
    experts or the one MLP, output layer. Not counted: norms, softmax, activations, embedding look-up, and
    anything that is recomputed. For training see ``training_flops``.
    """
    lengths = list(lengths)
    return _weight_flops(model, lengths) + _attention_flops(model, lengths)


def training_flops(model: ModelConfig, lengths: Iterable[int], *, frozen_base: bool = False) -> int:
    """Count those of a forward and a backward pass, as ``forward_flops`` does.

    The backward pass has two products for each of the forward pass. With a weight that is frozen
    it has one, the gradient of the input; what the weight's adapter adds, about its rank over the
    weight's size, is not counted.

    Args:
        model: the architecture.
        lengths: of the sequences.
        frozen_base: only adapters are trained.
    """
    lengths = list(lengths)
    weight_passes = 2 if frozen_base else 3
    return weight_passes * _weight_flops(model, lengths) + 3 * _attention_flops(model, lengths)


def _weight_flops(model: ModelConfig, lengths: Sequence[int]) -> int:
    """Count products with weights in a forward pass."""
    projections = model.hidden_size * (2 * model.query_size + 2 * model.key_size)
    router = model.hidden_size * model.num_experts
    mlps = model.mlps_per_token * 3 * model.hidden_size * model.intermediate_size
    output_layer = model.hidden_size * model.vocab_size
    per_token = model.num_layers * (projections + router + mlps) + output_layer
    return 2 * per_token * sum(lengths)


def _attention_flops(model: ModelConfig, lengths: Sequence[int]) -> int:
    """Count products of queries, keys, probabilities and values in a forward pass."""
    pairs = 0
    for layer_type in model.layer_types:
        window = model.sliding_window if layer_type == "sliding_attention" else None
        pairs += sum(attended_pairs(length, window) for length in lengths)
    return 4 * model.query_size * pairs
