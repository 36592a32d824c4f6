"""Implementations with injected faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_loop.certify.harmony_tokens import HarmonyMessage
from rl_loop.certify.implementation import SampledSequence, ScoredSequence
from rl_loop.certify.implementations.transformers_model import TransformersModel
from rl_loop.certify.model import read_weights

Plant = Callable[[TransformersModel], None]


def faulty(directory: Path, plant: Plant, precision: str = "fp32") -> TransformersModel:
    implementation = TransformersModel(directory, precision)
    with torch.no_grad():
        plant(implementation)
    return implementation


def shift_window(offset: int) -> Plant:
    def plant(implementation: TransformersModel) -> None:
        implementation.model.config.sliding_window += offset

    return plant


def layers(implementation: TransformersModel) -> Any:
    return implementation.model.model.layers


def router_bias_in_bf16(implementation: TransformersModel) -> None:
    for router in implementation.routers:
        router.bias.copy_(router.bias.bfloat16())


def no_sinks(implementation: TransformersModel) -> None:
    for layer in layers(implementation):
        layer.self_attn.sinks.fill_(-1e4)


class ClampBeforeBias(torch.nn.Module):
    """Experts that clamp the products of weights before they add the bias."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.gate_up_proj = experts.gate_up_proj
        self.gate_up_proj_bias = experts.gate_up_proj_bias
        self.down_proj = experts.down_proj
        self.down_proj_bias = experts.down_proj_bias

    def forward(self, x: Tensor, routes: Tensor, shares: Tensor) -> Tensor:
        products = torch.einsum("th,ehc->tec", x, self.gate_up_proj)
        gate = products[..., 0::2].clamp(max=7) + self.gate_up_proj_bias[:, 0::2]
        up = products[..., 1::2].clamp(-7, 7) + self.gate_up_proj_bias[:, 1::2]
        activated = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        every = torch.einsum("tec,ech->teh", activated, self.down_proj) + self.down_proj_bias
        tokens = torch.arange(len(x))[:, None]
        return (every[tokens, routes] * shares[..., None]).sum(1)


def clamp_before_bias(implementation: TransformersModel) -> None:
    for layer in layers(implementation):
        layer.mlp.experts = ClampBeforeBias(layer.mlp.experts)


def transposed_down(implementation: TransformersModel) -> None:
    for layer in layers(implementation):
        layer.mlp.experts.down_proj.copy_(layer.mlp.experts.down_proj.mT.clone())


def transposed_down_in_layer_2(implementation: TransformersModel) -> None:
    down = layers(implementation)[2].mlp.experts.down_proj
    down.copy_(down.mT.clone())


def half_interleaved(implementation: TransformersModel) -> None:
    for layer in layers(implementation):
        bias = layer.mlp.experts.gate_up_proj_bias
        gates, ups = bias.clone().chunk(2, dim=-1)
        bias[:, 0::2] = gates
        bias[:, 1::2] = ups


def truncated_ramp(implementation: TransformersModel) -> None:
    config = implementation.model.config
    config.rope_parameters = dict(config.rope_parameters) | {"truncate": True}
    rotary = type(implementation.model.model.rotary_emb)
    implementation.model.model.rotary_emb = rotary(config).to(implementation.device)


def positions_cut(implementation: TransformersModel) -> None:
    last = implementation.model.config.rope_parameters["original_max_position_embeddings"] - 1
    rotary = implementation.model.model.rotary_emb
    exact = rotary.forward
    rotary.forward = lambda x, position_ids: exact(x, position_ids.clamp(max=last))


def layer_types(*types: str) -> Plant:
    """Repeat a sequence of attention kinds through all layers."""

    def plant(implementation: TransformersModel) -> None:
        config = implementation.model.config
        config.layer_types = [types[i % len(types)] for i in range(config.num_hidden_layers)]

    return plant


def rope(**changes: object) -> Plant:
    """Build the rotary table with other parameters."""

    def plant(implementation: TransformersModel) -> None:
        config = implementation.model.config
        config.rope_parameters = dict(config.rope_parameters) | changes
        rotary = type(implementation.model.model.rotary_emb)
        implementation.model.model.rotary_emb = rotary(config).to(implementation.device)

    return plant


def longest_for_original(implementation: TransformersModel) -> None:
    longest = implementation.model.config.max_position_embeddings
    rope(original_max_position_embeddings=longest)(implementation)


def no_concentration(implementation: TransformersModel) -> None:
    implementation.model.model.rotary_emb.attention_scaling = 1.0


def bf16_positions(implementation: TransformersModel) -> None:
    rotary = implementation.model.model.rotary_emb
    exact = rotary.forward
    rotary.forward = lambda x, position_ids: exact(x, position_ids.bfloat16().float())


def zero(*names: str) -> Plant:
    """Set parameters to zero, by the ends of their names."""

    def plant(implementation: TransformersModel) -> None:
        for name, parameter in implementation.model.named_parameters():
            if name.endswith(names):
                parameter.zero_()

    return plant


def bf16_biases(implementation: TransformersModel) -> None:
    for name, parameter in implementation.model.named_parameters():
        if name.endswith("bias") and ".router." not in name:
            parameter.copy_(parameter.bfloat16())


def softmax_of_all(implementation: TransformersModel) -> None:
    def change(router: Any, inputs: Any, output: Any) -> Any:
        logits, _, routes = output
        return logits, logits.softmax(-1).gather(-1, routes), routes

    for router in implementation.routers:
        router.register_forward_hook(change)


def activation(slope: float = 1.702, offset: float = 1.0, limit: float = 7.0) -> Plant:
    """Replace the activation of all experts."""

    def apply_gate(gate_up: Tensor) -> Tensor:
        gate = gate_up[..., 0::2].clamp(max=limit)
        up = gate_up[..., 1::2].clamp(-limit, limit)
        return (up + offset) * gate * torch.sigmoid(slope * gate)

    def plant(implementation: TransformersModel) -> None:
        for layer in layers(implementation):
            layer.mlp.experts._apply_gate = apply_gate

    return plant


def halves(*names: str) -> Plant:
    """Interpret the interleaved gate and up channels of expert parameters as two halves."""

    def plant(implementation: TransformersModel) -> None:
        for layer in layers(implementation):
            for name in names:
                parameter = getattr(layer.mlp.experts, name)
                gates, ups = parameter.clone().chunk(2, dim=-1)
                parameter[..., 0::2] = gates
                parameter[..., 1::2] = ups

    return plant


def swapped_gate_up(implementation: TransformersModel) -> None:
    for layer in layers(implementation):
        for parameter in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.gate_up_proj_bias):
            gates = parameter[..., 0::2].clone()
            parameter[..., 0::2] = parameter[..., 1::2]
            parameter[..., 1::2] = gates


class StaleExpert(TransformersModel):
    """Does not update one expert."""

    def load_weights(self, directory: Path) -> None:
        experts = layers(self)[1].mlp.experts
        kept = {name: p[3].clone() for name, p in experts.named_parameters()}
        super().load_weights(directory)
        with torch.no_grad():
            for name, parameter in experts.named_parameters():
                parameter[3] = kept[name]


def keeping(part: str) -> type[TransformersModel]:
    """Return an implementation whose updates skip all parameters with ``part`` in their names."""

    class Keeping(TransformersModel):
        def load_weights(self, directory: Path) -> None:
            kept = {
                name: parameter.clone()
                for name, parameter in self.model.named_parameters()
                if part in name
            }
            super().load_weights(directory)
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if name in kept:
                        parameter.copy_(kept[name])

    return Keeping


class UpdatesOnce(TransformersModel):
    """Ignores every update but the first."""

    updates = 0

    def load_weights(self, directory: Path) -> None:
        self.updates += 1
        if self.updates == 1:
            super().load_weights(directory)


class RouterLearnsNothing(TransformersModel):
    """Blocks the gradient through the experts' weights."""

    def gradients(self, sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        def cut(router: Any, inputs: Any, output: Any) -> Any:
            logits, shares, routes = output
            return logits, shares.detach() + 0.0 * logits.sum(), routes

        hooks = [router.register_forward_hook(cut) for router in self.routers]
        gradients = super().gradients(sequences)
        for hook in hooks:
            hook.remove()
        return gradients


class TransposingUpdate(TransformersModel):
    """Loads square weights transposed."""

    def load_weights(self, directory: Path) -> None:
        super().load_weights(directory)
        with torch.no_grad():
            transposed_down(self)


class ZeroRoutes(TransformersModel):
    """Returns zeros instead of routes."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        scores = super().score(sequences)
        return [ScoredSequence(s.log_probs, np.zeros_like(s.routes)) for s in scores]


class LateRoutes(TransformersModel):
    """Returns the routes of a token for the next token."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        scores = super().score(sequences)
        return [ScoredSequence(s.log_probs, np.roll(s.routes, 1, axis=0)) for s in scores]


class EarlyRoutes(TransformersModel):
    """Returns the routes of a token for the previous token."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        scores = super().score(sequences)
        return [ScoredSequence(s.log_probs, np.roll(s.routes, -1, axis=0)) for s in scores]


class UpsideDownRoutes(TransformersModel):
    """Returns the routes of the last layer first."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        scores = super().score(sequences)
        return [ScoredSequence(s.log_probs, s.routes[:, ::-1]) for s in scores]


class IgnoresRoutes(TransformersModel):
    """Ignores given routes and lets its routers choose."""

    def score_with_routes(
        self, sequences: Sequence[Sequence[int]], routes: Sequence[np.ndarray]
    ) -> list[ScoredSequence]:
        return self.score(sequences)


class ConstrainAsText(TransformersModel):
    """Knows all special tokens but one."""

    def tokenize(self, text: str) -> list[int]:
        before, after = text.split("<|constrain|>")
        letters = [
            i
            for letter in ("<|", "constrain", "|>")
            for i in super(ConstrainAsText, self).tokenize(letter)
        ]
        return super().tokenize(before) + letters + super().tokenize(after)


class QuotesAsTokens(TransformersModel):
    """Renders special tokens in a tool's output as tokens."""

    def render(self, messages: Sequence[HarmonyMessage]) -> list[int]:
        return self.tokenize("".join(message.text for message in messages))


class ShortDecodingWindow(TransformersModel):
    """Decodes with one key less than it prefills with."""

    more_keys = -1

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> SampledSequence:
        ids: list[int] = []
        log_probs = []
        for _ in range(max_new_tokens):
            # The last token's query uses the short window if the token was decoded. Earlier tokens
            # keep the window with which they were computed.
            tokens = torch.tensor([[*prompt, *ids]])
            mask = self._masks(tokens.shape[1], len(prompt))
            output = self.model(tokens, attention_mask=mask, use_cache=False)
            likely, token = output.logits[0, -1].log_softmax(-1).max(dim=-1)
            ids.append(int(token))
            log_probs.append(float(likely))
        return SampledSequence(ids, log_probs)

    def _masks(self, length: int, prompt: int) -> dict[str, Tensor]:
        index = torch.arange(length)
        distance = index[:, None] - index[None]
        window = (
            self.model.config.sliding_window + self.more_keys * (index >= prompt).long()[:, None]
        )
        seen = distance >= 0
        hidden = torch.finfo(torch.float32).min
        full = torch.where(seen, 0.0, hidden)[None, None]
        sliding = torch.where(seen & (distance < window), 0.0, hidden)[None, None]
        return {"full_attention": full, "sliding_attention": sliding}


class LongDecodingWindow(ShortDecodingWindow):
    """Decodes with one key more than it prefills with."""

    more_keys = 1


class LeakyRows(TransformersModel):
    """Packs like transformers 5.12 with position ids only.

    Its GPT-OSS does not pass them to its mask (huggingface/transformers#39997).
    """

    starts_again = True

    @torch.no_grad()
    def score_packed(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        row = torch.tensor([[token for sequence in sequences for token in sequence]])
        positions = torch.arange(row.shape[1])[None]
        if self.starts_again:
            positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None]
        logits = self.model(row, position_ids=positions, use_cache=False).logits[0]
        log_probs = logits.log_softmax(-1)
        results = []
        start = 0
        for sequence in sequences:
            rows = log_probs[start : start + len(sequence) - 1]
            labels = torch.tensor(sequence[1:])[:, None]
            results.append(ScoredSequence(rows.gather(-1, labels)[:, 0].tolist()))
            start += len(sequence)
        return results


class OneLongRow(LeakyRows):
    """Treats a row as one sequence."""

    starts_again = False


class Wavering(TransformersModel):
    """Rounds differently at every call."""

    calls = 0

    def score(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        self.calls += 1
        offset = 1e-3 * (self.calls % 2)
        return [
            ScoredSequence([p - offset for p in s.log_probs], s.routes)
            for s in super().score(sequences)
        ]


def other_epsilon(implementation: TransformersModel) -> None:
    """A fault that is not in the list of known faults."""
    for module in implementation.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.03


def weights_are_equal(directory: Path, other: Path) -> bool:
    mine = read_weights(directory).tensors
    theirs = read_weights(other).tensors
    return all(torch.equal(mine[name], theirs[name]) for name in mine)
