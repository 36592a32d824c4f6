"""Floating-point operations of a training step, for all reported TFLOP/s and MFU."""

from collections.abc import Iterable, Sequence

from megatron_gptoss.config import ModelConfig

MATMUL_CEILING = 790e12
"""FLOP/s of a large bf16 matrix product on an H200.

``matmul_ceiling`` measures 763e12 to 789e12 (docs/performance/training.md). Predicted MFU is
relative to this value, and predicted decoding steps use it.
"""


def attended_pairs(length: int, window: int | None = None) -> int:
    """Return the number of (query, key) pairs of a causal sequence.

    Args:
        length: tokens of the sequence.
        window: number of keys that a query sees, including its own; None for all earlier keys.

    Example:
        >>> attended_pairs(4), attended_pairs(4, window=2)
        (10, 7)
    """
    # The first `full` queries see 1, 2, ..., full keys. Every later query sees `full` keys.
    full = min(length, window or length)
    return full * (full + 1) // 2 + (length - full) * full


def forward_flops(model: ModelConfig, lengths: Iterable[int], starts: Iterable[int] = ()) -> int:
    """Return the floating-point operations of a forward pass over packed sequences.

    A multiply-add counts as 2.

    - Counted: attention projections, query-key and probability-value products of visible pairs,
      router, selected experts or dense MLP, output layer.
    - Not counted: norms, softmax, activations, embedding lookup, recomputation.

    Args:
        model: architecture.
        lengths: tokens of each sequence. With ``starts``: position after the last token of each
            segment (``RowSegments``).
        starts: position of each segment's first token. Empty if sequences share no prefixes.
    """
    # A segment has the operations of a sequence that ends with it, minus those of earlier tokens.
    lengths = list(lengths)
    earlier = list(starts)
    weights = _weight_flops(model, lengths) - _weight_flops(model, earlier)
    return weights + _attention_flops(model, lengths) - _attention_flops(model, earlier)


def training_flops(
    model: ModelConfig,
    lengths: Iterable[int],
    starts: Iterable[int] = (),
    *,
    frozen_base: bool = False,
) -> int:
    """Return the floating-point operations of a forward and a backward pass.

    Args:
        model: architecture.
        lengths: see ``forward_flops``.
        starts: see ``forward_flops``.
        frozen_base: whether only adapters are trained.

    Example:
        >>> from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
        >>> model = GptOssModelConfig(num_layers=24, num_experts=32)
        >>> flops_per_token = training_flops(model, [4096]) / 4096
        >>> print(f"{flops_per_token:.2e}")
        2.29e+10
    """
    # For each product the backward pass has two, the gradients of both factors. A frozen weight has
    # one, the gradient of the input. Products of adapters are small and not counted.
    lengths = list(lengths)
    earlier = list(starts)
    weights = _weight_flops(model, lengths) - _weight_flops(model, earlier)
    weight_passes = 2 if frozen_base else 3
    return 3 * forward_flops(model, lengths, earlier) - (3 - weight_passes) * weights


def _weight_flops(model: ModelConfig, lengths: Sequence[int]) -> int:
    """Return the operations of products with weights in a forward pass."""
    projections = model.hidden_size * (2 * model.query_size + 2 * model.key_size)
    router = model.hidden_size * model.num_experts
    mlps = model.mlps_per_token * 3 * model.hidden_size * model.intermediate_size
    output_layer = model.hidden_size * model.vocab_size
    per_token = model.num_layers * (projections + router + mlps) + output_layer
    return 2 * per_token * sum(lengths)


def _attention_flops(model: ModelConfig, lengths: Sequence[int]) -> int:
    """Return the operations of query-key and probability-value products in a forward pass."""
    pairs = 0
    for layer_type in model.layer_types:
        window = model.sliding_window if layer_type == "sliding_attention" else None
        pairs += sum(attended_pairs(length, window) for length in lengths)
    return 4 * model.query_size * pairs
