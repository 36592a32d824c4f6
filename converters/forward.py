"""GPT-OSS layer by layer in fp32, straight from the files of either side, for a few tokens.

Each side has its own arithmetic, written from the layout itself and not from the name table: a table that is wrong in
both directions the same way moves every weight there and back unharmed, but not through this. A layer reads one weight
at a time, of the experts only those that the tokens are routed to, so memory does not grow with the model."""

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


class Side:
    """Weights of one model with the arithmetic of its layout; x and results are fp32 [tokens, ...]."""

    names: ClassVar[dict[str, str]]
    """What the layout calls the tensors and linear maps that both layouts hold alike."""

    def __init__(self, config: ModelConfig, get: Callable[..., Tensor]) -> None:
        """``get`` of HfDirectory or of MegatronCheckpoint."""
        self.config, self.get = config, get

    def of(self, name: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        """A tensor by the layout's name, which in a layer is without the layers' common prefix."""
        raise NotImplementedError

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, heads or groups, head_size]"""
        raise NotImplementedError

    def expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        raise NotImplementedError

    def linear(self, name: str, x: Tensor, layer: int, expert: int | None = None) -> Tensor:
        """x [tokens, in] through a map with weight [out, in] and bias."""
        weight, bias = (self.of(f"{name}.{kind}", layer, expert).float() for kind in ("weight", "bias"))
        return linear(x, weight, bias)


class HuggingFaceSide(Side):
    """Of a directory: separate q, k and v; experts x @ [in, out] with alternating gate and up channels."""

    names: ClassVar[dict[str, str]] = {
        "embedding": "model.embed_tokens.weight",
        "output layer": "lm_head.weight",
        "final norm": "model.norm.weight",
        "norm before attention": "input_layernorm.weight",
        "norm before experts": "post_attention_layernorm.weight",
        "sinks": "self_attn.sinks",
        "attention output": "self_attn.o_proj",
    }

    def of(self, name: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        return self.get(name if layer is None else f"model.layers.{layer}.{name}", expert)

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.linear(f"self_attn.{name}_proj", x, layer) for name in "qkv")
        size = self.config.head_size
        return q.unflatten(-1, (-1, size)), k.unflatten(-1, (-1, size)), v.unflatten(-1, (-1, size))

    def expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        def project(name: str, x: Tensor) -> Tensor:
            weight, bias = (self.of(f"mlp.experts.{name}{end}", layer, expert).float() for end in ("", "_bias"))
            return x @ weight + bias

        both = project("gate_up_proj", x)
        return project("down_proj", swiglu(both[:, 0::2], both[:, 1::2], self.config.swiglu_limit))


class MegatronSide(Side):
    """Of a torch_dist checkpoint: one QKV by groups; experts [out, in] @ x, all gates before all ups."""

    names: ClassVar[dict[str, str]] = {
        "embedding": "embedding.word_embeddings.weight",
        "output layer": "output_layer.weight",
        "final norm": "decoder.final_layernorm.weight",
        "norm before attention": "self_attention.linear_qkv.layer_norm_weight",
        "norm before experts": "pre_mlp_layernorm.weight",
        "sinks": "self_attention.core_attention.softmax_offset",
        "attention output": "self_attention.linear_proj",
    }

    def of(self, name: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        index = tuple(i for i in (layer, expert) if i is not None)
        return self.get(name if layer is None else f"decoder.layers.{name}", index)

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed = self.linear("self_attention.linear_qkv", x, layer)
        groups = mixed.view(len(x), self.config.num_key_value_heads, -1, self.config.head_size)
        return groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]

    def expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        experts = "mlp.experts.experts"
        gate, up = self.linear(f"{experts}.linear_fc1", x, layer, expert).chunk(2, dim=-1)
        return self.linear(f"{experts}.linear_fc2", swiglu(gate, up, self.config.swiglu_limit), layer, expert)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """The clamped activation of GPT-OSS (openai/gpt-oss, gpt_oss/torch/model.py)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def embedded(side: Side, tokens: Tensor) -> Tensor:
    """[tokens] -> [tokens, hidden]"""
    return side.of(side.names["embedding"])[tokens].float()


def update(side: Side, config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    """What a layer adds to the residual stream x: [tokens, hidden], one sequence."""
    norms = (side.of(side.names[f"norm before {part}"], layer).float() for part in ("attention", "experts"))
    before_attention, before_experts = norms
    width, eps, tokens = (config.hidden_size,), config.rms_norm_eps, len(x)
    q, k, v = side.query_key_value(layer, rms_norm(x, width, before_attention, eps))
    cos, sin = RotaryEmbedding(config).cos_sin(torch.arange(tokens), torch.float32)
    q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_size**-0.5
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if config.layer_types[layer] == "sliding_attention":
        seen &= ~seen.tril(-config.sliding_window)
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = side.of(side.names["sinks"], layer).float()[:, None, None].expand(-1, tokens, 1)
    probabilities = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    attended = torch.einsum("hqk,khd->qhd", probabilities, v).flatten(1)
    middle = x + side.linear(side.names["attention output"], attended, layer)
    normed = rms_norm(middle, width, before_experts, eps)
    best, chosen = side.linear("mlp.router", normed, layer).topk(config.experts_per_token)
    weights = best.softmax(-1)
    result = middle.clone()
    for expert in chosen.unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        result[rows] += weights[rows, slots, None] * side.expert(layer, expert, normed[rows])
    return result - x


def logits(side: Side, config: ModelConfig, x: Tensor) -> Tensor:
    """Of the last hidden states x: [tokens, hidden] -> [tokens, vocabulary]."""
    normed = rms_norm(x, (config.hidden_size,), side.of(side.names["final norm"]).float(), config.rms_norm_eps)
    output_layer = side.of(side.names["output layer"]).split(VOCABULARY_BLOCK)
    return torch.cat([normed @ rows.float().T for rows in output_layer], dim=-1)


def deviations(config: ModelConfig, ours: Side, theirs: Side) -> Iterator[tuple[str, float]]:
    """Per stage of the network the largest difference of the two, relative to the largest value.

    Both sides continue from the hidden states of the first: a difference in one layer does not show in later ones."""
    tokens = torch.arange(TOKENS) * 7919 % config.vocab_size
    x = embedded(ours, tokens)
    yield "embedding", _relative(x, embedded(theirs, tokens))
    for layer in range(config.num_layers):
        added = update(ours, config, layer, x)
        yield f"layer {layer}", _relative(added, update(theirs, config, layer, x))
        x = x + added
    yield "logits", _relative(logits(ours, config, x), logits(theirs, config, x))


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-30)).item()
