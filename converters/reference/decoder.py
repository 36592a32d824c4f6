"""A model layer by layer in fp32, straight from the files of either side, for a few tokens.

Each side has its own arithmetic (``layout_model``, ``families``). A layer reads one weight at a time,
of experts only those that the tokens are routed to, so memory does not grow with the model.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import rms_norm

from converters.reference.layouts import LayoutModel, Tensor
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.layers.rotary import RotaryEmbedding, apply_rotary

VOCABULARY_BLOCK = 16_384
"""Rows of the output layer in fp32 at a time."""
TOKENS = 16
"""Length of the sequence that both sides compute."""


def embed(model: LayoutModel, tokens: Tensor) -> Tensor:
    """Look up tokens [tokens] -> [tokens, hidden]."""
    return model.tensor(model.names["embedding"])[tokens].float()


def layer_update(model: LayoutModel, config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    """Compute what a layer adds to the residual stream x [tokens, hidden] of one sequence."""
    after_attention = x + _attention(model, config, layer, x)
    return _add_mlp(model, config, layer, after_attention) - x


def _attention(model: LayoutModel, config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    """Compute the output [tokens, hidden] of a layer's norm and attention."""
    tokens = len(x)
    norm = model.tensor(model.names["norm before attention"], layer).float()
    normed = rms_norm(x, (config.hidden_size,), norm, config.rms_norm_eps)
    query, key, value = model.query_key_value(layer, normed)

    cos, sin = RotaryEmbedding(config).cos_sin(torch.arange(tokens), torch.float32)
    query = apply_rotary(query, cos, sin)
    key = apply_rotary(key, cos, sin)

    # Grouped-query attention: every key/value head serves several query heads.
    queries_per_group = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(queries_per_group, dim=1)
    value = value.repeat_interleave(queries_per_group, dim=1)

    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if config.layer_types[layer] == "sliding_attention":
        assert config.sliding_window is not None
        visible &= ~visible.tril(-config.sliding_window)
    scores = torch.einsum("qhd,khd->hqk", query, key) * config.head_size**-0.5
    scores = scores.masked_fill(~visible, -torch.inf)

    probabilities = _softmax(scores, model.sinks(layer))
    attended = torch.einsum("hqk,khd->qhd", probabilities, value).flatten(1)
    return model.attention_output(layer, attended)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute the probabilities of scores [heads, queries, keys]."""
    if sinks is None:
        return scores.softmax(-1)

    # A sink takes part in the softmax like the score of one more key, which has no value.
    column = sinks[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


def _add_mlp(model: LayoutModel, config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    """Add to x [tokens, hidden] the output of a layer's second norm and what follows it."""
    norm = model.tensor(model.names["norm before mlp"], layer).float()
    return x + model.mlp(layer, rms_norm(x, (config.hidden_size,), norm, config.rms_norm_eps))


def logits(model: LayoutModel, config: ModelConfig, x: Tensor) -> Tensor:
    """Map the last hidden states x [tokens, hidden] to [tokens, vocabulary]."""
    norm = model.tensor(model.names["final norm"]).float()
    normed = rms_norm(x, (config.hidden_size,), norm, config.rms_norm_eps)
    output_name = "embedding" if config.tied_embeddings else "output layer"
    output_layer = model.tensor(model.names[output_name])
    # In fp32 all of it would be twice the size of the tensor that was read.
    blocks = output_layer.split(VOCABULARY_BLOCK)
    return torch.cat([normed @ rows.float().T for rows in blocks], dim=-1)


def compare_stages(
    config: ModelConfig, first: LayoutModel, second: LayoutModel
) -> Iterator[tuple[str, float]]:
    """Yield each stage of the network and the largest difference relative to the largest value.

    Both continue from the hidden states of ``first``: a difference in one layer does not show in
    later ones.
    """
    # A prime stride spreads the tokens over the vocabulary.
    tokens = torch.arange(TOKENS) * 7919 % config.vocab_size
    x = embed(first, tokens)
    yield "embedding", _relative_difference(x, embed(second, tokens))

    for layer in range(config.num_layers):
        update = layer_update(first, config, layer, x)
        other_update = layer_update(second, config, layer, x)
        yield f"layer {layer}", _relative_difference(update, other_update)
        x = x + update

    yield (
        "logits",
        _relative_difference(logits(first, config, x), logits(second, config, x)),
    )


def _relative_difference(first: Tensor, second: Tensor) -> float:
    largest = first.abs().max().clamp_min(1e-30)
    return ((first - second).abs().max() / largest).item()
