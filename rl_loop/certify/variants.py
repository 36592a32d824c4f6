"""The reference of GPT-OSS (``converters.reference``), with every known fault as a switch.

Without a switch the reference computes the correct results. ``run.py`` compares it with
transformers' GptOssForCausalLM before it judges an implementation. With a switch the
reference computes the results of an implementation with that fault: the difference shows how visible the
fault is, and identifies it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from converters.reference.decoder import Decoder
from converters.reference.gpt_oss import SWISH_SLOPE, GptOss, HuggingFaceGptOss
from converters.reference.rotary import plain_frequencies, yarn_frequencies
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig

EVERY_LAYER = -1

GateUpPart = Literal["all", "weights", "biases"]


@dataclass(frozen=True)
class FaultyVariant:
    """Faults in a computation of GPT-OSS. The defaults are without faults."""

    window_offset: int = 0
    """Number of additional keys that a token of a window layer sees."""
    decoding_window_offset: int = 0
    """Number of additional keys for tokens that were decoded one by one, not for the prompt."""
    windows: Literal["even", "odd", "all", "none"] = "even"
    """0-based layers that have a window."""
    sinks: Literal["exact", "absent", "no gradient", "absent in the backward pass"] = "exact"
    yarn: Literal["exact", "ramp rounded", "absent", "cut", "no concentration", "wrong length"] = (
        "exact"
    )
    """Fault of YaRN. "cut": positions beyond the original length count as its last position.
    "wrong length": the longest length replaces the original length."""
    bf16_positions: bool = False
    """Round positions to bf16 before the angles are computed."""
    router_bias: Literal["exact", "absent", "bf16"] = "exact"
    router_softmax: Literal["chosen", "all"] = "chosen"
    """Experts over which the softmax runs."""
    router_gradient: bool = True
    """Pass gradients through the shares of the experts."""
    clamp: Literal["exact", "absent", "before bias"] = "exact"
    up_offset: float = 1.0
    slope: float = SWISH_SLOPE
    concatenated: GateUpPart | None = None
    """Tensors whose gate and up channels are read as halves instead of alternating."""
    swapped_gate_up: bool = False
    transposed_down: int | None = None
    """Layer whose (square) down projections are transposed; EVERY_LAYER for all."""
    absent_biases: tuple[str, ...] = ()
    """Name suffixes of tensors that are zeros."""
    bf16_biases: bool = False
    """Round all biases to bf16, except the router's."""
    expert_not_updated: tuple[int, int] | None = None
    """(layer, expert) with the weights from before an update."""
    not_updated: str | None = None
    """Part of the tensor names that have the values from before an update; "" for all."""
    leaky_packing: bool = False
    """Let sequences in one packed row attend to earlier sequences."""
    running_positions: bool = False
    """Continue positions over the sequences in one packed row."""


EXACT = FaultyVariant()
EXPERT_FAULTS = ("clamp", "up_offset", "slope", "concatenated", "swapped_gate_up")
"""Fields of a variant that change the computation of an expert."""


@dataclass(frozen=True)
class ReferenceResult:
    """Result of the reference for one sequence of n tokens."""

    log_probs: Tensor
    """fp64 [n - 1]: log p(token i + 1 | tokens 0..i), in nats."""
    best: Tensor
    """fp64 [n - 1]: log-prob of the most likely token there."""
    routes: Tensor
    """int64 [n - 1, layers, top_k]: experts of each input."""
    margins: Tensor
    """fp64 [n - 1, layers]: logit of the last chosen expert minus the next logit."""


class ReferenceModel:
    """Evaluates one set of weights.

    Args:
        config: architecture of the model.
        weights: {Hugging Face name: tensor}.
        before: tensors from before an update, for the variants that keep old weights.
        dtype: dtype of everything except angles, which are always fp32. Results are on the CPU.
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
        # Converted only once, because each sequence is evaluated with many variants.
        self._weights = self._taken(weights)
        self._before = self._taken(before or {})

    def _taken(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device, self.dtype) for name, tensor in weights.items()}

    @torch.no_grad()
    def evaluate(
        self,
        sequence: Sequence[int],
        variant: FaultyVariant = EXACT,
        *,
        prompt_length: int | None = None,
        routes: Tensor | None = None,
        starts: Sequence[int] = (0,),
    ) -> ReferenceResult:
        """Evaluate one sequence.

        Args:
            sequence: at least two token ids.
            variant: faults of the computation.
            prompt_length: number of prefilled tokens; None for all.
            routes: int64 [n - 1, layers, top_k]: experts to use instead of the router's.
            starts: first positions of the sequences in a packed row.
        """
        # This makes the device the default of all new tensors, including those of the equations.
        with self.device:
            row = _TokenRow(len(sequence) - 1, variant, prompt_length, tuple(starts))
            given = None if routes is None else routes.to(self.device)
            return self._run(torch.tensor(sequence), row, variant, given)

    def gradients(
        self, sequences: Sequence[Sequence[int]], variant: FaultyVariant
    ) -> dict[str, Tensor]:
        """Return the gradients of the mean of -log p over all predicted tokens."""
        # Clones, because the cached weights must not require gradients in later evaluations.
        leaves = {name: w.clone().requires_grad_() for name, w in self._weights.items()}
        copy = ReferenceModel(self.config, {}, dtype=self.dtype)
        copy._weights = leaves

        # Divide by the tokens of all sequences, because the gradients of the sequences are summed.
        tokens = sum(len(sequence) - 1 for sequence in sequences)
        for sequence in sequences:
            with self.device:
                row = _TokenRow(len(sequence) - 1, variant, None, (0,))
                evaluated = copy._run(torch.tensor(sequence), row, variant, None)
            (-evaluated.log_probs.sum() / tokens).backward()
        gradients = {}
        for name, leaf in leaves.items():
            # An expert that no token chose has no gradient.
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            gradients[name] = gradient.cpu()
        return gradients

    def _run(
        self, tokens: Tensor, row: "_TokenRow", variant: FaultyVariant, routes: Tensor | None
    ) -> ReferenceResult:
        source = _VariantWeights(self._weights, self._before, variant)
        layout = HuggingFaceGptOss(self.config, source.get, self.dtype)
        model = VariantGptOss(self.config, layout, variant, row, routes)

        # Always in fp64: rounding of this softmax would count as an error of the model's precision.
        log_probs = model.logits(tokens[:-1]).to(torch.float64).log_softmax(-1)
        picked = log_probs.gather(-1, tokens[1:, None])[:, 0]
        best = log_probs.amax(-1)
        return ReferenceResult(
            picked.cpu(),
            best.cpu(),
            torch.stack(model.routes, 1).cpu(),
            torch.stack(model.margins, 1).cpu(),
        )


class _TokenRow:
    """Positions and sequences of the inputs [n] of one row of tokens."""

    def __init__(
        self,
        inputs: int,
        variant: FaultyVariant,
        prompt_length: int | None,
        starts: tuple[int, ...],
    ) -> None:
        index = torch.arange(inputs)
        self.index = index

        # Index of each input's sequence, and the position where that sequence begins.
        boundaries = torch.tensor(starts[1:], dtype=torch.long)
        self.sequence = torch.bucketize(index, boundaries, right=True)
        beginnings = torch.tensor(starts)[self.sequence]
        self.positions = index if variant.running_positions else index - beginnings
        # Without a prompt length no input is decoded, because no index reaches inputs + 1.
        self.is_decoded = index >= inputs + 1 if prompt_length is None else index >= prompt_length


class _VariantWeights:
    """Weights with the faults of a variant."""

    def __init__(
        self, weights: Mapping[str, Tensor], before: Mapping[str, Tensor], variant: FaultyVariant
    ) -> None:
        self._weights = weights
        self._before = before
        self._variant = variant

    def get(self, name: str, expert: int | None = None) -> Tensor:
        """Return a tensor, or its slice for one expert."""
        variant = self._variant
        if expert is None:
            return self._tensor(name)

        # Tensors of experts are named model.layers.LAYER.mlp.experts.PART.
        layer = int(name.split(".")[2])
        is_not_updated = variant.expert_not_updated == (layer, expert)
        tensor = self._before[name][expert] if is_not_updated else self._tensor(name)[expert]
        is_transposed = variant.transposed_down in (layer, EVERY_LAYER)
        return tensor.T if is_transposed and name.endswith(".down_proj") else tensor

    def _tensor(self, name: str) -> Tensor:
        variant = self._variant
        tensor = self._weights[name]
        # This keeps the values and stops the gradient.
        if variant.sinks == "no gradient" and name.endswith(".sinks"):
            tensor = tensor.detach()
        if variant.not_updated is not None and variant.not_updated in name:
            tensor = self._before[name]
        if variant.absent_biases and name.endswith(variant.absent_biases):
            return torch.zeros_like(tensor)

        # ``bf16_biases`` leaves out the router's bias, which is a separate fault.
        if name.endswith("router.bias"):
            if variant.router_bias == "absent":
                return torch.zeros_like(tensor)
            return _round(tensor) if variant.router_bias == "bf16" else tensor
        if variant.bf16_biases and name.endswith("bias"):
            return _round(tensor)
        return tensor


class VariantGptOss(GptOss):
    """The equations of GPT-OSS with the faults of a variant.

    Args:
        config: architecture of the model.
        layout: weights.
        variant: faults of the computation.
        row: positions of the inputs.
        given: int64 [n, layers, top_k]: experts to use instead of the router's.
    """

    config: GptOssModelConfig

    def __init__(
        self,
        config: GptOssModelConfig,
        layout: HuggingFaceGptOss,
        variant: FaultyVariant,
        row: _TokenRow,
        given: Tensor | None,
    ) -> None:
        super().__init__(config, layout)
        self.variant = variant
        self.row = row
        self.given = given

        self.routes: list[Tensor] = []
        """Experts, int64 [n, top_k], one entry per layer."""
        self.margins: list[Tensor] = []
        """Margins [n] of the router's own choice, one entry per layer."""

    # -- attention --------------------------------------------------------------------------------

    def rotary_frequencies(self) -> tuple[Tensor, float]:
        return variant_frequencies(self.config, self.variant)

    def positions(self, tokens: int) -> Tensor:
        positions = self.row.positions
        if self.variant.yarn == "cut":
            positions = positions.clamp(max=self.config.yarn_original_length - 1)
        # bf16 has 8 significant bits, so positions above 256 are no longer exact.
        return _round(positions.float()) if self.variant.bf16_positions else positions

    def has_window(self, layer: int) -> bool:
        windows = {"even": layer % 2 == 0, "odd": layer % 2 == 1, "all": True, "none": False}
        return windows[self.variant.windows]

    def visible(self, layer: int, queries: slice, keys: slice) -> Tensor:
        row = self.row
        # Distances in the row, because positions restart with every sequence.
        distance = row.index[queries, None] - row.index[None, keys]
        visible = distance >= 0
        if not self.variant.leaky_packing:
            visible &= row.sequence[queries, None] == row.sequence[None, keys]
        if self.has_window(layer):
            window = self.config.sliding_window + self.variant.window_offset
            decoded = row.is_decoded[queries, None] * self.variant.decoding_window_offset
            visible &= distance < window + decoded
        return visible

    def weighted_values(self, layer: int, scores: Tensor, value: Tensor) -> Tensor:
        if self.variant.sinks == "absent":
            # Decoder's softmax has no column for the sink.
            return Decoder.weighted_values(self, layer, scores, value)

        exact = super().weighted_values(layer, scores, value)
        if self.variant.sinks == "absent in the backward pass":
            without = Decoder.weighted_values(self, layer, scores, value)
            # The values of ``exact`` with the gradient of ``without``.
            return without + (exact - without).detach()
        return exact

    # -- experts ----------------------------------------------------------------------------------

    def choose_experts(self, layer: int, logits: Tensor) -> Tensor:
        top_k = self.config.experts_per_token
        # One expert more than needed: the margin is its distance from the last chosen one.
        ranked, order = logits.topk(min(top_k + 1, logits.shape[-1]))
        chosen = order[:, :top_k] if self.given is None else self.given[:, layer]
        self.margins.append((ranked[:, top_k - 1] - ranked[:, -1]).detach().double())
        self.routes.append(chosen)
        return chosen

    def expert_weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        if self.variant.router_softmax == "all":
            shares = logits.softmax(-1).gather(-1, chosen)
        else:
            shares = super().expert_weights(logits, chosen)
        return shares if self.variant.router_gradient else shares.detach()

    def expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        variant = self.variant
        # Without faults of experts, use the reference's own code, so that EXACT is the reference.
        if all(getattr(variant, name) == getattr(EXACT, name) for name in EXPERT_FAULTS):
            return super().expert(layer, expert, x)

        # Keep products and biases separate, because the faults lie in how they are combined.
        products = x @ self.layout.weight("mlp.experts.gate_up_proj", layer, expert)
        bias = self.layout.weight("mlp.experts.gate_up_proj_bias", layer, expert)
        gate, up = _split_gate_up(products, variant, "weights")
        gate_bias, up_bias = _split_gate_up(bias, variant, "biases")
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
        return self.layout.down(layer, expert, activated)


def variant_frequencies(
    config: GptOssModelConfig, variant: FaultyVariant = EXACT
) -> tuple[Tensor, float]:
    """Return the angles per position, fp32 [head_size / 2], and the factor of cos and sin."""
    if variant.yarn == "absent":
        return plain_frequencies(config), 1.0

    scaling = config.rope_frequencies
    if variant.yarn == "wrong length":
        scaling = scaling.model_copy(update={"original_max_position_embeddings": config.max_length})
    if variant.yarn == "ramp rounded":
        scaling = scaling.model_copy(update={"truncate": True})
    frequencies, factor = yarn_frequencies(plain_frequencies(config), config.rope_theta, scaling)
    return frequencies, 1.0 if variant.yarn == "no concentration" else factor


def _split_gate_up(x: Tensor, variant: FaultyVariant, what: GateUpPart) -> tuple[Tensor, Tensor]:
    """Split the last dimension into gate and up channels."""
    if variant.concatenated in (what, "all"):
        first, second = x.chunk(2, dim=-1)
        return first, second
    return x[..., 0::2], x[..., 1::2]


def _round(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def combine(first: FaultyVariant, second: FaultyVariant) -> FaultyVariant:
    """Return a variant with the faults of both. If both set a field, the second one wins."""
    # A field without a fault must not undo the first variant's fault.
    changes = {}
    for name, value in vars(second).items():
        if value != getattr(EXACT, name):
            changes[name] = value
    return replace(first, **changes)
