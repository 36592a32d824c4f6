"""The equations of a decoder, for one sequence of tokens.

A family is a subclass of ``Decoder`` (``gpt_oss``, ``dense``). Its methods are the steps of a
forward pass, in the order in which they are taken.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import rms_norm

from converters.reference.layouts import WeightLayout
from converters.reference.rotary import rotary_frequencies, rotate
from megatron_gptoss.config import ModelConfig

Tensor = torch.Tensor

QUERY_BLOCK = 512
"""Queries whose scores are in memory at a time."""
VOCABULARY_BLOCK = 16_384
"""Rows of the output layer that are in memory in ``dtype`` at a time."""
STAGE_TOKENS = 16
"""Length of ``compare_stages``'s sequence."""


class Decoder:
    """A decoder with pre-norm layers of grouped-query attention and an MLP.

    Args:
        config: architecture of the model.
        layout: weights, and the dtype in which everything but rotary angles is computed.
    """

    def __init__(self, config: ModelConfig, layout: WeightLayout) -> None:
        self.config = config
        self.layout = layout

    def logits(self, tokens: Tensor) -> Tensor:
        """Compute the logits [tokens, vocabulary] after each of the tokens [tokens]."""
        x = self.embed(tokens)
        for layer in range(self.config.num_layers):
            x = self.layer(layer, x)
        return self.output(x)

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up tokens [tokens]; [tokens, hidden]."""
        # Index first: converting the whole embedding to ``dtype`` would need much memory.
        embedding = self.layout.stored(self.layout.names["embedding"])
        return embedding[tokens].to(self.layout.dtype)

    def layer(self, layer: int, x: Tensor) -> Tensor:
        """Update the residual stream x [tokens, hidden] by one layer."""
        x = x + self.attention(layer, self.norm("norm before attention", x, layer))
        return x + self.mlp(layer, self.norm("norm before mlp", x, layer))

    def output(self, x: Tensor) -> Tensor:
        """Map the last hidden states x [tokens, hidden] to logits [tokens, vocabulary]."""
        x = self.norm("final norm", x)
        # A tied output layer has no tensor in either layout.
        name = "embedding" if self.config.tied_embeddings else "output layer"
        rows = self.layout.stored(self.layout.names[name]).split(VOCABULARY_BLOCK)
        return torch.cat([x @ block.to(self.layout.dtype).T for block in rows], dim=-1)

    def norm(self, name: str, x: Tensor, layer: int | None = None) -> Tensor:
        """Apply an RMSNorm to x [tokens, hidden]."""
        weight = self.layout.weight(self.layout.names[name], layer)
        return rms_norm(x, (len(weight),), weight, self.config.rms_norm_eps)

    # -- attention --------------------------------------------------------------------------------

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """Compute a layer's attention of the normed x [tokens, hidden]; [tokens, hidden]."""
        query, key, value = self.query_key_value(layer, x)
        cos, sin = self.rotation(len(x))
        query = rotate(query, cos, sin)
        key = rotate(key, cos, sin)

        # Every key/value head serves a group of query heads.
        group = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(group, dim=1)
        value = value.repeat_interleave(group, dim=1)

        blocks = []
        for start in range(0, len(x), QUERY_BLOCK):
            queries = slice(start, min(start + QUERY_BLOCK, len(x)))
            # Other keys are not visible. Long texts would take minutes with them.
            keys = slice(self.first_key(layer, start), queries.stop)
            scores = torch.einsum("qhd,khd->hqk", query[queries], key[keys])
            scores = scores * self.config.head_size**-0.5
            scores = scores.masked_fill(~self.visible(layer, queries, keys), -torch.inf)
            blocks.append(self.weighted_values(layer, scores, value[keys]))
        return self.attention_output(layer, torch.cat(blocks).flatten(1))

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [tokens, hidden] to query, key and value [tokens, heads, head_size]."""
        raise NotImplementedError

    def rotation(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [tokens, 1, head_size / 2] of the rotary embedding, scaled."""
        frequencies, factor = self.rotary_frequencies()
        # In fp32 for any dtype, as all implementations do: fp64 would have other angles at
        # position 4,000.
        angles = self.positions(tokens).float()[:, None, None] * frequencies
        return (
            (angles.cos() * factor).to(self.layout.dtype),
            (angles.sin() * factor).to(self.layout.dtype),
        )

    def rotary_frequencies(self) -> tuple[Tensor, float]:
        """Return the angles per position, fp32 [head_size / 2], and the factor of cos and sin."""
        return rotary_frequencies(self.config)

    def positions(self, tokens: int) -> Tensor:
        """Return the positions [tokens] of the tokens in their sequence."""
        return torch.arange(tokens)

    def has_window(self, layer: int) -> bool:
        """Return True if a layer attends within the sliding window."""
        return self.config.layer_types[layer] == "sliding_attention"

    def first_key(self, layer: int, first_query: int) -> int:
        """Return an index below which no query from ``first_query`` on sees a key."""
        if not self.has_window(layer):
            return 0
        assert self.config.sliding_window is not None
        # One key more than needed, so that variants can see a key too many.
        return max(0, first_query - self.config.sliding_window - 1)

    def visible(self, layer: int, queries: slice, keys: slice) -> Tensor:
        """Return which keys each query sees, bool [queries, keys]."""
        query_index = torch.arange(queries.start, queries.stop)
        key_index = torch.arange(keys.start, keys.stop)
        distance = query_index[:, None] - key_index
        # A token sees itself and earlier tokens.
        visible = distance >= 0
        if self.has_window(layer):
            assert self.config.sliding_window is not None
            # The window includes the token itself.
            visible &= distance < self.config.sliding_window
        return visible

    def weighted_values(self, layer: int, scores: Tensor, value: Tensor) -> Tensor:
        """Average values [keys, heads, head_size] by the softmax of scores [heads, queries, keys].

        Returns:
            [queries, heads, head_size].
        """
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)

    def attention_output(self, layer: int, x: Tensor) -> Tensor:
        """Project the heads' outputs x [tokens, heads * head_size] to [tokens, hidden]."""
        raise NotImplementedError

    # -- MLP --------------------------------------------------------------------------------------

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """Compute a layer's MLP of the normed x [tokens, hidden]; [tokens, hidden]."""
        raise NotImplementedError


def compare_stages(first: Decoder, second: Decoder) -> Iterator[tuple[str, float]]:
    """Yield each stage of two models and the difference of its outputs.

    Both models continue from the hidden states of ``first``: a difference in one layer does not
    show in later layers.

    Yields:
        "embedding", "layer 0", ... or "logits", and the largest difference relative to the largest
        value.
    """
    config = first.config
    # A prime stride spreads the tokens over the vocabulary.
    tokens = torch.arange(STAGE_TOKENS) * 7919 % config.vocab_size
    x = first.embed(tokens)
    yield "embedding", _relative_difference(x, second.embed(tokens))

    for layer in range(config.num_layers):
        # Compare updates: in the sum, the residual stream would hide a small layer's difference.
        update = first.layer(layer, x) - x
        other_update = second.layer(layer, x) - x
        yield f"layer {layer}", _relative_difference(update, other_update)
        x = x + update

    yield "logits", _relative_difference(first.output(x), second.output(x))


def _relative_difference(first: Tensor, second: Tensor) -> float:
    # The bound avoids 0 / 0 for an update of zero.
    largest = first.abs().max().clamp_min(1e-30)
    return ((first - second).abs().max() / largest).item()
