"""Measures the dense model on the calibration text: scales, routers, and the loss of each change."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

from converters.hf_directory import HfDirectory
from converters.names import hf_shapes
from converters.ordered_map import Progress
from converters.reference.decoder import Decoder
from converters.reference.dense import DenseEquations, HuggingFaceDense
from converters.reference.gpt_oss import SWISH_SLOPE, swiglu
from converters.upcycling.architecture import UpcycleOptions
from converters.upcycling.routers import balancing_bias, expert_loads, router_weight
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.families.gpt_oss.config import SWIGLU_LIMIT, GptOssModelConfig

# Half of the bound, because other texts reach larger values than the calibration text.
TARGET_PEAK = 4.0
"""Largest ``scale * up`` on the calibration text. ``up'`` reaches its clamp at 8."""
SMALLEST_PEAK = 0.05
"""Lower bound of a channel's peak, so that unused channels get no huge scale."""


@dataclass(frozen=True)
class UpcycleReport:
    """Sizes of an upcycled model, and its loss on the calibration text. ``str`` gives a text."""

    config: GptOssModelConfig
    parameters: int
    """Parameters in the upcycled model."""
    tokens: int
    """Tokens in the calibration text."""
    dense_loss: float
    """Loss of the dense model, nats per token."""
    clamped_loss: float
    """Loss with the clamps of GPT-OSS, nats per token."""
    upcycled_loss: float
    """Loss with clamps, windows and sinks, without the noise, nats per token."""
    clamped_share: float
    """Share of the gate activations above the clamp."""
    clamped_layers: tuple[int, ...]
    """Layers with such activations."""
    load_min: float
    """Load of the least used expert of all layers. 1 is an even share of the tokens."""
    load_max: float
    """Load of the most used expert of all layers."""

    def __str__(self) -> str:
        config = self.config
        lines = [
            f"{self.parameters:,} parameters: {config.num_layers} layers, {config.num_experts} "
            f"experts, {config.experts_per_token} per token",
            "exact: embedding, rotary embedding, projections, norms, output layer, and experts "
            "within their clamps",
            f"loss on {self.tokens:,} tokens of calibration text, nats per token:",
        ]

        losses = {
            "dense model": self.dense_loss,
            "with the clamps of GPT-OSS": self.clamped_loss,
            f"with clamps, sinks and windows of {config.sliding_window:,}": self.upcycled_loss,
        }
        for name, loss in losses.items():
            lines.append(f"  {name:44} {loss:.4f} ({loss - self.dense_loss:+.4f})")

        if self.clamped_layers:
            layers = ", ".join(map(str, self.clamped_layers))
            lines.append(
                f"{self.clamped_share:.2g} of the gate activations exceed {SWIGLU_LIMIT:g} "
                f"(layers {layers})"
            )
        lines.append(
            f"load of the experts: {self.load_min:.2f} to {self.load_max:.2f} times an even share"
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class CalibrationResult:
    """Activations and losses of the dense model on the calibration text."""

    up_scales: list[Tensor]
    """Scale of every ``up`` channel, fp64 [intermediate_size] per layer; powers of two."""
    router_biases: list[Tensor]
    """Every layer's router bias, [experts]."""
    report: UpcycleReport


class _MeasuredDense(DenseEquations):
    """Dense reference that records the largest magnitude of every ``up`` channel."""

    def __init__(self, config: DenseModelConfig, layout: HuggingFaceDense) -> None:
        super().__init__(config, layout)
        self.up_peaks: list[Tensor] = []
        self.clamped: list[int] = []
        """Number of gate activations above the clamp, per layer."""

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        gate, up = self.layout.gate_up(layer, None, x)
        self.up_peaks.append(up.abs().amax(0))
        # GPT-OSS clamps the gate only from above. ``up`` stays within its clamp by its scale.
        self.clamped.append(int((gate / SWISH_SLOPE > SWIGLU_LIMIT).sum()))
        return self.layout.down(layer, None, silu(gate) * up)


class _ClampedDense(DenseEquations):
    """Dense reference with the activation of the upcycled model."""

    up_scales: list[Tensor]

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        gate, up = self.layout.gate_up(layer, None, x)
        # The scales are applied to activations here, and to weights in the new model. The products
        # are equal, and no matrix is copied.
        scale = self.up_scales[layer].to(x.dtype)
        activated = swiglu(gate / SWISH_SLOPE, up * scale - 1, SWIGLU_LIMIT)
        return self.layout.down(layer, None, activated * (SWISH_SLOPE / scale))


class _WindowedDense(_ClampedDense):
    """Dense reference with the activation, windows and sinks of the upcycled model."""

    sink: float
    sliding_window: int
    routers: list[Tensor]
    """Router weight of every layer, [experts, hidden_size]."""

    def __init__(self, config: DenseModelConfig, layout: HuggingFaceDense) -> None:
        super().__init__(config, layout)
        self.router_logits: list[Tensor] = []
        """Router logits of every layer without bias, [tokens, experts]."""

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        # The routers are measured in this pass, because its hidden states are those of the new
        # model, except for the experts' noise.
        self.router_logits.append(x @ self.routers[layer].to(x.dtype).T)
        return super().mlp(layer, x)

    def visible(self, layer: int, queries: slice, keys: slice) -> Tensor:
        visible = super().visible(layer, queries, keys)
        # In GPT-OSS the even layers have the window.
        if layer % 2:
            return visible
        query_index = torch.arange(queries.start, queries.stop)
        key_index = torch.arange(keys.start, keys.stop)
        return visible & (query_index[:, None] - key_index < self.sliding_window)

    def weighted_values(self, layer: int, scores: Tensor, value: Tensor) -> Tensor:
        # The sink is a column of the softmax that takes probability and has no value.
        sinks = scores.new_full((*scores.shape[:2], 1), self.sink)
        probabilities = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return torch.einsum("hqk,khd->qhd", probabilities, value)


def measure(
    source: HfDirectory,
    config: GptOssModelConfig,
    options: UpcycleOptions,
    tokens: Tensor,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Choose scales of ``up`` and biases of routers, and predict the loss of the upcycled model.

    Args:
        source: dense model.
        config: architecture of the upcycled model.
        options: properties of the upcycled model.
        tokens: calibration text, int64 [tokens].
        progress: function of (read bytes, total bytes).
    """
    dense = source.config
    assert isinstance(dense, DenseModelConfig)
    passes = 3
    model_bytes = sum(
        math.prod(shape) * source.dtype(name).itemsize for name, shape in hf_shapes(dense).items()
    )

    def report_pass(number: int, share: float) -> None:
        """Report the progress of a pass."""
        if progress is not None:
            progress(int((number + share) * model_bytes), passes * model_bytes)

    def reference[T: DenseEquations](kind: type[T]) -> T:
        """Return a model of this class with the dense weights."""
        return kind(dense, HuggingFaceDense(dense, source.get))

    # Three passes, each with one more difference to the dense model, so that the report has
    # the cost of each difference. The scales of the first pass are needed by the others.
    measured = reference(_MeasuredDense)
    dense_loss = _loss(measured, tokens, partial(report_pass, 0))
    up_scales = [_up_scale(peak) for peak in measured.up_peaks]

    clamped = reference(_ClampedDense)
    clamped.up_scales = up_scales
    clamped_loss = _loss(clamped, tokens, partial(report_pass, 1))

    windowed = reference(_WindowedDense)
    windowed.up_scales = up_scales
    windowed.sink = options.sink
    windowed.sliding_window = config.sliding_window
    windowed.routers = [router_weight(config, options, layer) for layer in range(config.num_layers)]
    upcycled_loss = _loss(windowed, tokens, partial(report_pass, 2))

    biases = [balancing_bias(logits, config) for logits in windowed.router_logits]
    loads = torch.stack(
        [
            expert_loads(logits + bias, config)
            for logits, bias in zip(windowed.router_logits, biases, strict=True)
        ]
    )

    activations = config.num_layers * len(tokens) * config.intermediate_size
    report = UpcycleReport(
        config=config,
        parameters=sum(math.prod(shape) for shape in hf_shapes(config).values()),
        tokens=len(tokens),
        dense_loss=dense_loss,
        clamped_loss=clamped_loss,
        upcycled_loss=upcycled_loss,
        clamped_share=sum(measured.clamped) / activations,
        clamped_layers=tuple(layer for layer, count in enumerate(measured.clamped) if count),
        load_min=float(loads.min()),
        load_max=float(loads.max()),
    )
    return CalibrationResult(up_scales, biases, report)


def _loss(model: Decoder, tokens: Tensor, progress: Callable[[float], None]) -> float:
    """Return the mean loss over all tokens but the first, in nats per token.

    ``progress`` is called with the completed share of the layers.
    """
    layers = model.config.num_layers
    x = model.embed(tokens)
    for layer in range(layers):
        x = model.layer(layer, x)
        progress((layer + 1) / layers)
    # In fp32, because differences between the passes may be 1e-4 nats.
    return cross_entropy(model.output(x)[:-1].float(), tokens[1:]).item()


def _up_scale(peak: Tensor) -> Tensor:
    """Return the scale of each ``up`` channel with the largest magnitudes ``peak``."""
    # bf16 rounds ``up' = scale * up - 1``, so a small ``scale * up`` loses bits to the 1. Therefore
    # the scale is as large as the clamp allows. A power of two keeps all bits of the weights.
    target_scale = TARGET_PEAK / peak.double().clamp_min(SMALLEST_PEAK)
    return torch.exp2(target_scale.log2().floor())
