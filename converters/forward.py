"""GPT-OSS layer by layer in fp32, straight from the files of either side, for a few tokens.

Each side has its own arithmetic, written from the layout itself and not from the name table: a table that is wrong in
both directions the same way moves every weight there and back unharmed, but not through this. A layer reads one weight
at a time, of the experts only those that the tokens are routed to, so memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch.nn.functional import linear, rms_norm

from converters.hf_directory import HfDirectory
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.rotary import RotaryEmbedding, apply_rotary

Tensor = torch.Tensor
VOCABULARY_BLOCK = 16_384
"""Rows of the output layer in fp32 at a time."""
TOKENS = 16


class Side(Protocol):
    """Weights of one model with the arithmetic of its layout; x and results are fp32 [tokens, ...]."""

    def embedding(self) -> Tensor: ...

    def output_layer(self) -> Tensor: ...

    def final_norm(self) -> Tensor: ...

    def norms(self, layer: int) -> tuple[Tensor, Tensor]:
        """Before attention, before the experts."""

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, heads or groups, head_size]"""

    def sinks(self, layer: int) -> Tensor: ...

    def attention_output(self, layer: int, x: Tensor) -> Tensor: ...

    def router(self, layer: int, x: Tensor) -> Tensor: ...

    def expert(self, layer: int, expert: int, x: Tensor) -> Tensor: ...


class HuggingFaceSide:
    """Of a directory: separate q, k and v; experts x @ [in, out] with alternating gate and up channels."""

    def __init__(self, source: HfDirectory) -> None:
        self._get, self._config = source.get, source.config

    def embedding(self) -> Tensor:
        return self._get("model.embed_tokens.weight")

    def output_layer(self) -> Tensor:
        return self._get("lm_head.weight")

    def final_norm(self) -> Tensor:
        return self._get("model.norm.weight").float()

    def norms(self, layer: int) -> tuple[Tensor, Tensor]:
        first, second = (self._of(layer, f"{name}_layernorm.weight") for name in ("input", "post_attention"))
        return first, second

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            self._linear(layer, f"self_attn.{n}_proj", x).unflatten(-1, (-1, self._config.head_size)) for n in "qkv"
        )
        return q, k, v

    def sinks(self, layer: int) -> Tensor:
        return self._of(layer, "self_attn.sinks")

    def attention_output(self, layer: int, x: Tensor) -> Tensor:
        return self._linear(layer, "self_attn.o_proj", x)

    def router(self, layer: int, x: Tensor) -> Tensor:
        return self._linear(layer, "mlp.router", x)

    def expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        def project(name: str, x: Tensor) -> Tensor:
            return x @ self._of(layer, f"mlp.experts.{name}", expert) + self._of(
                layer, f"mlp.experts.{name}_bias", expert
            )

        both = project("gate_up_proj", x)
        return project("down_proj", swiglu(both[:, 0::2], both[:, 1::2], self._config.swiglu_limit))

    def _of(self, layer: int, name: str, expert: int | None = None) -> Tensor:
        return self._get(f"model.layers.{layer}.{name}", expert).float()

    def _linear(self, layer: int, name: str, x: Tensor) -> Tensor:
        return linear(x, self._of(layer, f"{name}.weight"), self._of(layer, f"{name}.bias"))


class MegatronSide:
    """Of a torch_dist checkpoint: one QKV by groups; experts [out, in] @ x, all gates before all ups."""

    def __init__(self, config: ModelConfig, get: Callable[[str, tuple[int, ...]], Tensor]) -> None:
        """``get`` returns the tensor of a checkpoint key at an index of layers (and experts)."""
        self._get, self._config = get, config

    def embedding(self) -> Tensor:
        return self._get("embedding.word_embeddings.weight", ())

    def output_layer(self) -> Tensor:
        return self._get("output_layer.weight", ())

    def final_norm(self) -> Tensor:
        return self._get("decoder.final_layernorm.weight", ()).float()

    def norms(self, layer: int) -> tuple[Tensor, Tensor]:
        return (
            self._of(layer, "self_attention.linear_qkv.layer_norm_weight"),
            self._of(layer, "pre_mlp_layernorm.weight"),
        )

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed = self._linear(layer, "self_attention.linear_qkv", x)
        groups = mixed.view(len(x), self._config.num_key_value_heads, -1, self._config.head_size)
        return groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]

    def sinks(self, layer: int) -> Tensor:
        return self._of(layer, "self_attention.core_attention.softmax_offset")

    def attention_output(self, layer: int, x: Tensor) -> Tensor:
        return self._linear(layer, "self_attention.linear_proj", x)

    def router(self, layer: int, x: Tensor) -> Tensor:
        return self._linear(layer, "mlp.router", x)

    def expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        gate, up = self._linear(layer, "mlp.experts.experts.linear_fc1", x, expert).chunk(2, dim=-1)
        return self._linear(
            layer, "mlp.experts.experts.linear_fc2", swiglu(gate, up, self._config.swiglu_limit), expert
        )

    def _of(self, layer: int, name: str, *expert: int) -> Tensor:
        return self._get(f"decoder.layers.{name}", (layer, *expert)).float()

    def _linear(self, layer: int, name: str, x: Tensor, *expert: int) -> Tensor:
        return linear(x, self._of(layer, f"{name}.weight", *expert), self._of(layer, f"{name}.bias", *expert))


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """The clamped activation of GPT-OSS (openai/gpt-oss, gpt_oss/torch/model.py)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def embedded(side: Side, tokens: Tensor) -> Tensor:
    """[tokens] -> [tokens, hidden]"""
    return side.embedding()[tokens].float()


def update(side: Side, config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    """What a layer adds to the residual stream x: [tokens, hidden], one sequence."""
    before_attention, before_experts = side.norms(layer)
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
    sinks = side.sinks(layer)[:, None, None].expand(-1, tokens, 1)
    probabilities = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    attended = torch.einsum("hqk,khd->qhd", probabilities, v).flatten(1)
    middle = x + side.attention_output(layer, attended)
    normed = rms_norm(middle, width, before_experts, eps)
    best, chosen = side.router(layer, normed).topk(config.experts_per_token)
    weights = best.softmax(-1)
    result = middle.clone()
    for expert in chosen.unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        result[rows] += weights[rows, slots, None] * side.expert(layer, expert, normed[rows])
    return result - x


def logits(side: Side, config: ModelConfig, x: Tensor) -> Tensor:
    """Of the last hidden states x: [tokens, hidden] -> [tokens, vocabulary]."""
    normed = rms_norm(x, (config.hidden_size,), side.final_norm(), config.rms_norm_eps)
    return torch.cat([normed @ rows.float().T for rows in side.output_layer().split(VOCABULARY_BLOCK)], dim=-1)


def deviations(config: ModelConfig, ours: Side, theirs: Side) -> Iterator[tuple[str, float]]:
    """Per stage of the network the largest difference of the two, relative to the largest value.

    Both sides continue from the hidden states of the first: a difference in one layer does not show in the later ones.
    """
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
