"""GPT-OSS written out from its definition, with every known fault as a switch.

With no switch set it is what a subject has to compute, in fp64; ``run.py`` compares it with
transformers' GptOssForCausalLM before it judges anybody. With a switch it is what a subject with
that fault computes, which says how far the fault would be seen, and names it when it is seen.

It shares no code with the trainer and the engines of this project, which it judges.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot, rms_norm

from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig

QUERY_BLOCK = 512
"""Queries whose scores are held at a time."""
SWISH_SLOPE = 1.702
EVERY_LAYER = -1

Which = Literal["all", "weights", "biases"]


@dataclass(frozen=True)
class Variant:
    """How a model departs from GPT-OSS. The defaults do not."""

    window_offset: int = 0
    """Keys that a token of a window layer sees more than it should."""
    decoding_window_offset: int = 0
    """The same for tokens that were decoded one by one, and not for the prompt."""
    windows: Literal["even", "odd", "all", "none"] = "even"
    """Which 0-based layers have a window."""
    sinks: Literal["exact", "absent", "no gradient", "absent in the backward pass"] = "exact"
    yarn: Literal["exact", "ramp rounded", "absent", "cut", "no concentration", "wrong length"] = (
        "exact"
    )
    """"cut": positions beyond the original length count as its last one. "wrong length": the
    longest length stands in for the original one."""
    bf16_positions: bool = False
    """Positions are rounded to bf16 before they become angles."""
    router_bias: Literal["exact", "absent", "bf16"] = "exact"
    router_softmax: Literal["chosen", "all"] = "chosen"
    """Over which experts the softmax is taken."""
    router_gradient: bool = True
    """Whether gradients pass through the weights of the experts."""
    clamp: Literal["exact", "absent", "before bias"] = "exact"
    up_offset: float = 1.0
    slope: float = SWISH_SLOPE
    concatenated: Which | None = None
    """Gates and ups are taken for halves of the channels, and not for every other channel."""
    swapped_gate_up: bool = False
    transposed_down: int | None = None
    """Layer whose (square) down projections are transposed; EVERY_LAYER: of all."""
    absent_biases: tuple[str, ...] = ()
    """Tensors whose names end so are zeros."""
    bf16_biases: bool = False
    """All biases but the router's are rounded to bf16."""
    stale_expert: tuple[int, int] | None = None
    """(layer, expert) that kept the weights from before an update."""
    stale: str | None = None
    """Tensors whose names contain this kept their values; "" is in all names."""
    leaky_packing: bool = False
    """Sequences in one row see those before them."""
    running_positions: bool = False
    """Sequences in one row do not begin at position 0."""


EXACT = Variant()


@dataclass(frozen=True)
class Evaluated:
    """What the reference computes for one text of n tokens."""

    log_probs: Tensor
    """fp64 [n - 1]: log p(token i + 1 | tokens 0..i), in nats."""
    best: Tensor
    """fp64 [n - 1]: the log-prob of the most likely token there."""
    routes: Tensor
    """int64 [n - 1, layers, top_k]: the experts that each input was sent to."""
    margins: Tensor
    """fp64 [n - 1, layers]: by how much the last chosen expert's logit beats the next one's."""


class Reference:
    """Evaluates one set of weights.

    Args:
        config: of the model.
        weights: Hugging Face tensors by name.
        before: those from before an update, for the variants that did not take it.
        dtype: in which everything but angles is computed; angles are fp32 for any. Results are on
            the CPU, wherever they were computed.
    """

    def __init__(
        self,
        config: GptOssModelConfig,
        weights: Mapping[str, Tensor],
        before: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._weights = self._taken(weights)
        self._before = self._taken(before or {})

    def _taken(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device, self.dtype) for name, tensor in weights.items()}

    @torch.no_grad()
    def evaluate(
        self,
        text: Sequence[int],
        variant: Variant = EXACT,
        *,
        prompt_length: int | None = None,
        routes: Tensor | None = None,
        starts: Sequence[int] = (0,),
    ) -> Evaluated:
        """Evaluate one text.

        Args:
            text: token ids, at least two.
            variant: the faults to have.
            prompt_length: tokens that were prefilled; None: all were.
            routes: int64 [n - 1, layers, top_k], to take instead of choosing experts.
            starts: where the sequences of a packed row begin.
        """
        with self.device:
            row = _Row(torch.tensor(text), variant, prompt_length, tuple(starts))
            given = None if routes is None else routes.to(self.device)
            return self._run(_Pass(self, row, variant), given)

    def gradients(self, texts: Sequence[Sequence[int]], variant: Variant) -> dict[str, Tensor]:
        """Compute the gradients of the mean of -log p over all predicted tokens, by name."""
        leaves = {name: w.clone().requires_grad_() for name, w in self._weights.items()}
        copy = Reference(self.config, {}, dtype=self.dtype)
        copy._weights = leaves

        tokens = sum(len(text) - 1 for text in texts)
        for text in texts:
            with self.device:
                row = _Row(torch.tensor(text), variant, None, (0,))
                evaluated = copy._run(_Pass(copy, row, variant), None)
            (-evaluated.log_probs.sum() / tokens).backward()
        gradients = {}
        for name, leaf in leaves.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            gradients[name] = gradient.cpu()
        return gradients

    def _run(self, model: "_Pass", routes: Tensor | None) -> Evaluated:
        inputs = model.row.tokens[:-1]
        x = model.weight("model.embed_tokens.weight")[inputs]
        chosen = []
        margins = []
        for layer in range(self.config.num_layers):
            x = x + model.attention(layer, x)
            given = None if routes is None else routes[:, layer]
            update, layer_routes, margin = model.experts(layer, x, given)
            x = x + update
            chosen.append(layer_routes)
            margins.append(margin)

        x = model.norm("model.norm.weight", x)
        logits = (x @ model.weight("lm_head.weight").T).to(torch.float64)
        log_probs = logits.log_softmax(-1)
        picked = log_probs.gather(-1, model.row.tokens[1:, None])[:, 0]
        best = log_probs.amax(-1)
        return Evaluated(
            picked.cpu(), best.cpu(), torch.stack(chosen, 1).cpu(), torch.stack(margins, 1).cpu()
        )


class _Row:
    """One row of tokens [n] and where its inputs [n - 1] stand."""

    def __init__(
        self,
        tokens: Tensor,
        variant: Variant,
        prompt_length: int | None,
        starts: tuple[int, ...],
    ) -> None:
        self.tokens = tokens
        inputs = len(tokens) - 1
        index = torch.arange(inputs)
        self.index = index

        # Which sequence an input belongs to, and where that one begins.
        boundaries = torch.tensor(starts[1:], dtype=torch.long)
        self.sequence = torch.bucketize(index, boundaries, right=True)
        beginnings = torch.tensor(starts)[self.sequence]
        self.positions = index if variant.running_positions else index - beginnings
        self.is_decoded = index >= inputs + 1 if prompt_length is None else index >= prompt_length


class _Pass:
    """The parts of one forward pass."""

    def __init__(self, reference: Reference, row: _Row, variant: Variant) -> None:
        self.reference = reference
        self.config = reference.config
        self.row = row
        self.variant = variant
        self.cos, self.sin = self._rotation()

    # -- weights ----------------------------------------------------------------------------------

    def weight(self, name: str) -> Tensor:
        """Return a tensor as the variant holds it."""
        variant = self.variant
        tensor = self.reference._weights[name]
        if variant.stale is not None and variant.stale in name:
            tensor = self.reference._before[name]
        if variant.absent_biases and name.endswith(variant.absent_biases):
            return torch.zeros_like(tensor)

        if name.endswith("router.bias"):
            if variant.router_bias == "absent":
                return torch.zeros_like(tensor)
            return _rounded(tensor) if variant.router_bias == "bf16" else tensor
        if variant.bf16_biases and name.endswith("bias"):
            return _rounded(tensor)
        return tensor

    def expert_weight(self, layer: int, expert: int, name: str) -> Tensor:
        """Return one expert's slice of a tensor as the variant holds it."""
        full_name = f"model.layers.{layer}.mlp.experts.{name}"
        if self.variant.stale_expert == (layer, expert):
            return self.reference._before[full_name][expert]
        return self.weight(full_name)[expert]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear layer with its bias."""
        return x @ self.weight(f"{name}.weight").T + self.weight(f"{name}.bias")

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Apply an RMSNorm."""
        weight = self.weight(name)
        return rms_norm(x, (len(weight),), weight, self.config.rms_norm_eps)

    # -- attention --------------------------------------------------------------------------------

    def _rotation(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin [n - 1, 1, head_size / 2] of the rotary embedding, scaled."""
        frequencies, scale = rotary_frequencies(self.config, self.variant)
        positions = self.row.positions
        if self.variant.yarn == "cut":
            positions = positions.clamp(max=self.config.yarn_original_length - 1)
        positions = positions.float()
        if self.variant.bf16_positions:
            positions = _rounded(positions)

        # In fp32, as everybody computes them: in fp64 position 4,000 would be another angle.
        angles = positions[:, None, None] * frequencies
        dtype = self.reference.dtype
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """Compute what a layer's attention adds to x [n - 1, hidden]."""
        config = self.config
        prefix = f"model.layers.{layer}.self_attn"
        x = self.norm(f"model.layers.{layer}.input_layernorm.weight", x)

        query = self._rotate(self._heads(f"{prefix}.q_proj", x))
        key = self._rotate(self._heads(f"{prefix}.k_proj", x))
        value = self._heads(f"{prefix}.v_proj", x)
        group = config.num_attention_heads // config.num_key_value_heads
        key = key.repeat_interleave(group, dim=1)
        value = value.repeat_interleave(group, dim=1)

        has_window = {"even": layer % 2 == 0, "odd": layer % 2 == 1, "all": True, "none": False}
        windowed = has_window[self.variant.windows]
        sinks = self.weight(f"{prefix}.sinks")
        blocks = []
        for start in range(0, len(x), QUERY_BLOCK):
            rows = slice(start, min(start + QUERY_BLOCK, len(x)))
            blocks.append(self._attend(query, key, value, sinks, rows, windowed))
        return self.linear(f"{prefix}.o_proj", torch.cat(blocks).flatten(1))

    def _heads(self, name: str, x: Tensor) -> Tensor:
        return self.linear(name, x).unflatten(-1, (-1, self.config.head_size))

    def _rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(rotated, dim=-1)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        rows: slice,
        windowed: bool,
    ) -> Tensor:
        """Attend from a block of queries; [block, heads, head_size]."""
        # Keys that no query of the block sees are left out, or long texts would take minutes.
        first_key = 0
        if windowed:
            first_key = max(0, rows.start - self.config.sliding_window - 1)
        keys = slice(first_key, rows.stop)

        scores = torch.einsum("qhd,khd->hqk", query[rows], key[keys])
        scores = scores * self.config.head_size**-0.5
        scores = scores.masked_fill(~self._visible(rows, keys, windowed), -torch.inf)
        return self._weighted(scores, sinks, value[keys])

    def _weighted(self, scores: Tensor, sinks: Tensor, value: Tensor) -> Tensor:
        """Average values [keys, heads, head_size] by scores [heads, queries, keys] beside the
        sinks [heads]; [queries, heads, head_size]."""
        how = self.variant.sinks
        if how == "absent":
            return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)

        # A sink takes part in the softmax like the score of one more key, which has no value.
        if how == "no gradient":
            sinks = sinks.detach()
        column = sinks[:, None, None].expand(-1, scores.shape[1], 1)
        probabilities = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        exact = torch.einsum("hqk,khd->qhd", probabilities, value)
        if how == "absent in the backward pass":
            without = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
            return without + (exact - without).detach()
        return exact

    def _visible(self, rows: slice, keys: slice, windowed: bool) -> Tensor:
        """bool [block, keys]: which keys a query sees."""
        row = self.row
        distance = row.index[rows, None] - row.index[None, keys]
        visible = distance >= 0
        if not self.variant.leaky_packing:
            visible &= row.sequence[rows, None] == row.sequence[None, keys]
        if windowed:
            window = self.config.sliding_window + self.variant.window_offset
            decoded = row.is_decoded[rows, None] * self.variant.decoding_window_offset
            visible &= distance < window + decoded
        return visible

    # -- experts ----------------------------------------------------------------------------------

    def experts(self, layer: int, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what a layer's experts add to x [n - 1, hidden].

        Returns:
            That, the experts [n - 1, top_k], and the margins [n - 1] of the router's own choice.
        """
        x = self.norm(f"model.layers.{layer}.post_attention_layernorm.weight", x)
        top_k = self.config.experts_per_token
        logits = self.linear(f"model.layers.{layer}.mlp.router", x)

        ranked, order = logits.topk(min(top_k + 1, logits.shape[-1]))
        margins = (ranked[:, top_k - 1] - ranked[:, -1]).detach().double()
        chosen = order[:, :top_k] if given is None else given
        scores = logits.gather(-1, chosen)
        if self.variant.router_softmax == "all":
            shares = logits.softmax(-1).gather(-1, chosen)
        else:
            shares = scores.softmax(-1)
        if not self.variant.router_gradient:
            shares = shares.detach()

        outputs = []
        for expert in range(self.config.num_experts):
            picks = one_hot(chosen, self.config.num_experts)[..., expert].bool()
            tokens, slots = picks.nonzero(as_tuple=True)
            if len(tokens) == 0:
                continue
            weighted = self._expert(layer, expert, x[tokens]) * shares[tokens, slots, None]
            outputs.append(torch.zeros_like(x).index_add(0, tokens, weighted))
        return torch.stack(outputs).sum(0), chosen, margins

    def _expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        """Compute one expert's output of x [tokens, hidden]."""
        variant = self.variant
        products = x @ self.expert_weight(layer, expert, "gate_up_proj")
        bias = self.expert_weight(layer, expert, "gate_up_proj_bias")
        gate, up = _halves(products, variant, "weights")
        gate_bias, up_bias = _halves(bias, variant, "biases")
        if variant.swapped_gate_up:
            gate, up, gate_bias, up_bias = up, gate, up_bias, gate_bias

        limit = self.config.swiglu_limit
        if variant.clamp == "absent":
            gate = gate + gate_bias
            up = up + up_bias
        elif variant.clamp == "before bias":
            gate = gate.clamp(max=limit) + gate_bias
            up = up.clamp(-limit, limit) + up_bias
        else:
            gate = (gate + gate_bias).clamp(max=limit)
            up = (up + up_bias).clamp(-limit, limit)

        activated = gate * torch.sigmoid(variant.slope * gate) * (up + variant.up_offset)
        down = self.expert_weight(layer, expert, "down_proj")
        if variant.transposed_down in (layer, EVERY_LAYER):
            down = down.T
        return activated @ down + self.expert_weight(layer, expert, "down_proj_bias")


def rotary_frequencies(config: GptOssModelConfig, variant: Variant) -> tuple[Tensor, float]:
    """Return the angles per position, fp32 [head_size / 2], and the factor of cos and sin.

    YaRN (arXiv 2309.00071, section 3.2): frequencies of few rotations within the original length
    are divided by the factor, those of many are left alone, and a linear ramp lies between.
    """
    size = config.head_size
    base = config.rope_theta
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    plain = base**-exponents
    if variant.yarn == "absent":
        return plain, 1.0

    length = config.yarn_original_length
    if variant.yarn == "wrong length":
        length = config.max_length

    def channel_of(rotations: float) -> float:
        return size * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = channel_of(config.yarn_beta_fast)
    high = channel_of(config.yarn_beta_slow)
    if variant.yarn == "ramp rounded":
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    if low == high:
        high += 0.001

    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = plain / config.yarn_factor * ramp + plain * (1 - ramp)
    concentration = 0.1 * math.log(config.yarn_factor) + 1
    if variant.yarn == "no concentration":
        concentration = 1.0
    return frequencies, concentration


def _halves(x: Tensor, variant: Variant, what: Which) -> tuple[Tensor, Tensor]:
    """Split the last dimension into gates and ups."""
    if variant.concatenated in (what, "all"):
        first, second = x.chunk(2, dim=-1)
        return first, second
    return x[..., 0::2], x[..., 1::2]


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def combined(first: Variant, second: Variant) -> Variant:
    """Return a variant with the faults of both; where both change one field, the second's."""
    changes = {}
    for name, value in vars(second).items():
        if value != getattr(EXACT, name):
            changes[name] = value
    return replace(first, **changes)
