"""GPT-OSS layer by layer in fp32, straight from the files of either side, for a few tokens.

Each side has its own arithmetic, written from the layout itself and not from the name table: a
table that is wrong in both directions the same way moves every weight there and back unharmed, but
not through this. A layer reads one weight at a time, of the experts only those that the tokens are
routed to, so memory does not grow with the model.
"""

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch.nn.functional import linear, rms_norm

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.layers.rotary import RotaryEmbedding, apply_rotary

Tensor = torch.Tensor
VOCABULARY_BLOCK = 16_384
"""Rows of the output layer in fp32 at a time."""
TOKENS = 16
"""Length of the sequence that both sides compute."""


class LayoutModel:
    """Weights of one model with the arithmetic of its layout; x and results are fp32."""

    names: ClassVar[dict[str, str]]
    """What the layout calls the tensors and linear maps that both layouts hold alike."""

    def __init__(self, config: ModelConfig, get: Callable[..., Tensor]) -> None:
        """``get`` of HfDirectory or of MegatronCheckpoint."""
        self.config = config
        self.get = get

    def tensor(self, name: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        """Read a tensor by the layout's name; in a layer, without the layers' common prefix."""
        raise NotImplementedError

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [tokens, hidden] to three [tokens, heads or groups, head_size]."""
        raise NotImplementedError

    def apply_expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        """Compute one expert's output [tokens, hidden] of x [tokens, hidden]."""
        raise NotImplementedError

    def linear(self, name: str, x: Tensor, layer: int, expert: int | None = None) -> Tensor:
        """Map x [tokens, in] through a weight [out, in] and its bias."""
        weight = self.tensor(f"{name}.weight", layer, expert)
        bias = self.tensor(f"{name}.bias", layer, expert)
        return linear(x, weight.float(), bias.float())


class HuggingFaceModel(LayoutModel):
    """Separate q, k and v; experts x @ [in, out] with alternating gate and up channels."""

    names: ClassVar[dict[str, str]] = {
        "embedding": "model.embed_tokens.weight",
        "output layer": "lm_head.weight",
        "final norm": "model.norm.weight",
        "norm before attention": "input_layernorm.weight",
        "norm before experts": "post_attention_layernorm.weight",
        "sinks": "self_attn.sinks",
        "attention output": "self_attn.o_proj",
    }

    def tensor(self, name: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        if layer is None:
            return self.get(name, expert)
        return self.get(f"model.layers.{layer}.{name}", expert)

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        by_head = (-1, self.config.head_size)
        query = self.linear("self_attn.q_proj", x, layer).unflatten(-1, by_head)
        key = self.linear("self_attn.k_proj", x, layer).unflatten(-1, by_head)
        value = self.linear("self_attn.v_proj", x, layer).unflatten(-1, by_head)
        return query, key, value

    def apply_expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        gate_up = self._project("gate_up_proj", layer, expert, x)
        gate = gate_up[:, 0::2]
        up = gate_up[:, 1::2]
        return self._project("down_proj", layer, expert, swiglu(gate, up, self.config.swiglu_limit))

    def _project(self, name: str, layer: int, expert: int, x: Tensor) -> Tensor:
        weight = self.tensor(f"mlp.experts.{name}", layer, expert)
        bias = self.tensor(f"mlp.experts.{name}_bias", layer, expert)
        return x @ weight.float() + bias.float()


class MegatronModel(LayoutModel):
    """One QKV by groups; experts [out, in] @ x, all gates before all ups."""

    names: ClassVar[dict[str, str]] = {
        "embedding": "embedding.word_embeddings.weight",
        "output layer": "output_layer.weight",
        "final norm": "decoder.final_layernorm.weight",
        "norm before attention": "self_attention.linear_qkv.layer_norm_weight",
        "norm before experts": "pre_mlp_layernorm.weight",
        "sinks": "self_attention.core_attention.softmax_offset",
        "attention output": "self_attention.linear_proj",
    }

    def tensor(self, name: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        index = tuple(i for i in (layer, expert) if i is not None)
        if layer is None:
            return self.get(name, index)
        return self.get(f"decoder.layers.{name}", index)

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # a group is its query heads, its key head, its value head
        qkv = self.linear("self_attention.linear_qkv", x, layer)
        shape = (len(x), self.config.num_key_value_heads, -1, self.config.head_size)
        groups = qkv.view(shape)
        return groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]

    def apply_expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        experts = "mlp.experts.experts"
        gate_up = self.linear(f"{experts}.linear_fc1", x, layer, expert)
        gate, up = gate_up.chunk(2, dim=-1)
        activated = swiglu(gate, up, self.config.swiglu_limit)
        return self.linear(f"{experts}.linear_fc2", activated, layer, expert)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Apply the clamped activation of GPT-OSS (openai/gpt-oss, gpt_oss/torch/model.py)."""
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def embed(model: LayoutModel, tokens: Tensor) -> Tensor:
    """Look up tokens [tokens] -> [tokens, hidden]."""
    return model.tensor(model.names["embedding"])[tokens].float()


def layer_update(model: LayoutModel, config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    """Compute what a layer adds to the residual stream x [tokens, hidden] of one sequence."""
    after_attention = x + _attention(model, config, layer, x)
    return _add_experts(model, config, layer, after_attention) - x


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
        visible &= ~visible.tril(-config.sliding_window)
    scores = torch.einsum("qhd,khd->hqk", query, key) * config.head_size**-0.5
    scores = scores.masked_fill(~visible, -torch.inf)

    # A sink takes part in the softmax like the score of one more key, which has no value.
    sinks = model.tensor(model.names["sinks"], layer).float()[:, None, None].expand(-1, tokens, 1)
    probabilities = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    attended = torch.einsum("hqk,khd->qhd", probabilities, value).flatten(1)
    return model.linear(model.names["attention output"], attended, layer)


def _add_experts(model: LayoutModel, config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    """Add to x [tokens, hidden] the output of a layer's norm, router and experts."""
    norm = model.tensor(model.names["norm before experts"], layer).float()
    normed = rms_norm(x, (config.hidden_size,), norm, config.rms_norm_eps)

    # The softmax runs over the chosen experts only.
    router_logits = model.linear("mlp.router", normed, layer)
    top_logits, chosen = router_logits.topk(config.experts_per_token)
    weights = top_logits.softmax(-1)

    result = x.clone()
    for expert in chosen.unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        output = model.apply_expert(layer, expert, normed[rows])
        result[rows] += weights[rows, slots, None] * output
    return result


def logits(model: LayoutModel, config: ModelConfig, x: Tensor) -> Tensor:
    """Map the last hidden states x [tokens, hidden] to [tokens, vocabulary]."""
    norm = model.tensor(model.names["final norm"]).float()
    normed = rms_norm(x, (config.hidden_size,), norm, config.rms_norm_eps)
    output_layer = model.tensor(model.names["output layer"])
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
