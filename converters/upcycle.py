"""Upcycling: a dense Llama or Qwen2.5 model as a GPT-OSS model that computes the same function.

Sparse upcycling (arXiv 2212.05055) makes every expert a copy of the dense MLP. The weights of a
token's experts sum to 1, so any routing gives the dense output. GPT-OSS's activation equals the
dense one, after a change of scales:

    GPT-OSS:  min(gate', 7) * sigmoid(1.702 * gate') * (clamp(up', -7, 7) + 1)
    dense:    gate * sigmoid(gate) * up

    gate' = gate / 1.702,   up' = scale * up - 1,   down' = 1.702 / scale * down

The two models are equal where no clamp is reached. ``scale`` is chosen per channel so that ``up``
stays within its clamp. The clamp of ``gate`` cannot be moved, because the sigmoid is not linear.

Sinks, windows and noise on the experts change the function. ``UpcycleReport`` has the difference in
loss.

Routers are random. Hidden states have a large common part, by which some experts would get nearly
all tokens and others none. The routers' biases give all experts equal shares of the calibration
text. They do not change the function, because the experts are equal.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, silu

from converters.errors import ConversionError
from converters.harmony_tokens import harmony_tokens
from converters.hf_directory import HfDirectory, write_hf_directory
from converters.mapping import NamedTensor
from converters.model_extras import ModelExtras, read_extras
from converters.names import hf_shapes
from converters.ordered_map import Progress
from converters.reference.decoder import Decoder
from converters.reference.dense import DenseEquations, HuggingFaceDense
from converters.reference.gpt_oss import SWISH_SLOPE, swiglu
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.families.gpt_oss.config import SWIGLU_LIMIT, GptOssModelConfig
from megatron_gptoss.untrusted_files import MAX_LISTING_BYTES, UntrustedFileError, read_bytes

Tensor = torch.Tensor

# Half of the bound, because other texts reach larger values than the calibration text.
TARGET_PEAK = 4.0
"""Largest ``scale * up`` on the calibration text. ``up'`` reaches its clamp at 8."""
MAX_TEXT_BYTES = 16 << 20
"""Size limit of a calibration text. Only the first ``max_length`` tokens of it are used."""
SMALLEST_PEAK = 0.05
"""Lower bound of a channel's peak, so that unused channels get no huge scale."""

BALANCING_STEPS = 400
"""Corrections of a router's bias. Their size falls linearly to 0."""
BALANCING_RATE = 0.2
"""First correction of an unused expert's bias, relative to the logits' spread."""

CALIBRATION_TEXT = """\
The lighthouse keeper counted the ships that passed before sunrise: three fishing boats, a ferry on
its way to the island, and a grey freighter that had waited two days for the fog to lift. "Is it
always this quiet?" asked his granddaughter. He laughed and poured the tea. "In winter you would
not say so. The storm of 1987 broke every window on the north side."

Question: A baker sells 24 loaves in the morning and half as many in the afternoon. Each loaf costs
$3.50. How much money does the baker earn in a day?
Answer: In the afternoon the baker sells 24 / 2 = 12 loaves. Altogether there are 24 + 12 = 36
loaves, so the baker earns 36 * 3.50 = 126 dollars.

def moving_average(values, width):
    total = 0.0
    averages = []
    for index, value in enumerate(values):
        total += value
        if index >= width:
            total -= values[index - width]
        averages.append(total / min(index + 1, width))
    return averages

Photosynthesis turns carbon dioxide and water into sugar and oxygen. The reaction needs light,
which chlorophyll absorbs mostly in the red and blue parts of the spectrum; leaves look green
because that part is reflected. In 1779 Jan Ingenhousz showed that plants release oxygen only in
sunlight.

To install the package, create a virtual environment, activate it, and run `pip install example`.
If the command fails, check your Python version first. Send questions to help@example.org or open
an issue, with the full error message and the output of `python --version`.
"""
"""Text on which activations are measured if the caller has none: prose, arithmetic and code."""


@dataclass(frozen=True)
class UpcycleOptions:
    """Properties of the GPT-OSS model that the dense model does not have."""

    num_experts: int = 4
    """Experts per layer."""
    experts_per_token: int = 2
    """Experts to which each token is routed."""
    sliding_window: int = 128
    """Keys that a token sees in layers 0, 2, 4, ... The dense model sees all of them."""
    sink: float = 0.0
    """Initial sink logit of every head. -30 gives the sink a probability of almost 0."""
    expert_noise: float = 0.03
    """Standard deviation of the noise on every expert's copy of a dense matrix, relative to that of
    the matrix.

    Equal experts would get equal gradients, and stay equal.
    """
    router_std: float = 0.02
    """Standard deviation of the router's random weights."""
    seed: int = 0
    """Seed of noise and router."""
    harmony: bool = False
    """Rename unused added tokens of a ChatML tokenizer to Harmony's special tokens."""


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


def upcycle(
    source_dir: Path,
    target_dir: Path,
    options: UpcycleOptions,
    tokens: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
    measure_progress: Progress | None = None,
) -> UpcycleReport:
    """Write a GPT-OSS directory that computes the function of a dense one.

    Args:
        source_dir: Hugging Face directory of a Llama or Qwen2.5 model.
        target_dir: directory to write; must not exist.
        options: properties of the new model.
        tokens: tokens of the calibration text. Only the first ``max_length`` are used.
        dtype: dtype of the weights to write.
        progress: function of (written bytes, total bytes).
        measure_progress: function of (read bytes, total bytes) of the measurement before.

    Returns:
        Sizes and losses of the new model.

    Raises:
        ConversionError: if the source is not a dense model with plain rotary embeddings, the
            target exists, or a file cannot be read or written.
    """
    source = HfDirectory(source_dir)
    config = upcycled_config(source, options)
    extras = read_extras(source_dir)
    # Before the measurement, which reads the whole model: a tokenizer without enough unused tokens
    # is an error.
    renamed = harmony_tokens(extras) if options.harmony else None
    ids = torch.tensor(tokens[: config.max_length])
    if len(ids) < 2:
        raise ConversionError(
            f"the calibration text must have at least 2 tokens to measure activations, got {len(ids)}. "
            "Use a longer text"
        )

    with torch.no_grad():
        measured = measure(source, config, options, ids, measure_progress)
        tensors = upcycled_tensors(source, config, options, measured, dtype)
        if renamed is not None:
            tensors = renamed.with_rows(tensors)
            extras = renamed.extras
        write_hf_directory(
            target_dir,
            config,
            _with_progress(tensors, config, dtype, progress),
            extras=_without_dense_keys(extras),
        )
    return measured.report


def calibration_tokens(source_dir: Path, text: str = CALIBRATION_TEXT) -> list[int]:
    """Tokenize a text with the tokenizer of a model directory.

    Raises:
        ConversionError: if there is no readable tokenizer.json.
    """
    path = source_dir / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_buffer(read_bytes(path, MAX_LISTING_BYTES))
    except FileNotFoundError:
        raise ConversionError(
            f"{path}: no such file, but the calibration text must be tokenized. Copy the model's "
            "tokenizer.json, which transformers writes with save_pretrained"
        ) from None
    except UntrustedFileError as error:
        raise ConversionError(str(error)) from None
    except Exception as error:  # tokenizers raises no more specific type
        raise ConversionError(f"{path}: cannot be read ({error})") from None
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def read_calibration_text(path: Path) -> str:
    """Read a text file. Raises ConversionError."""
    try:
        return read_bytes(path, MAX_TEXT_BYTES).decode()
    except UntrustedFileError as error:
        raise ConversionError(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path}: cannot be read as text ({error})") from None


# -- architecture ----------------------------------------------------------------------------------


def upcycled_config(source: HfDirectory, options: UpcycleOptions) -> GptOssModelConfig:
    """Return the architecture of the upcycled model.

    Raises:
        ConversionError: if the source is not dense, or its rotary embedding is not plain.
    """
    dense = source.config
    where = source.path / "config.json"
    if not isinstance(dense, DenseModelConfig):
        raise ConversionError(
            f"{where}: model_type is {dense.model_type}, but only dense models can be upcycled. Use a "
            "Llama or Qwen2 model"
        )
    if dense.rope_scaling is not None:
        raise ConversionError(
            f"{where}: rope_scaling has rope_type {dense.rope_scaling.rope_type!r}, which GPT-OSS cannot "
            "represent. Use a model without rope_scaling"
        )
    if options.experts_per_token > options.num_experts:
        raise ConversionError(
            f"experts_per_token ({options.experts_per_token}) exceeds num_experts "
            f"({options.num_experts}). Lower experts_per_token"
        )

    # GPT-OSS always uses YaRN. With these bounds, its ramp covers no channel, so all frequencies stay
    # unchanged. A ramp over some channels would round them, even with factor 1.
    rotations_of_slowest = dense.max_length / (2 * math.pi * dense.rope_theta)
    return GptOssModelConfig(
        num_layers=dense.num_layers,
        num_experts=options.num_experts,
        experts_per_token=options.experts_per_token,
        hidden_size=dense.hidden_size,
        intermediate_size=dense.intermediate_size,
        num_attention_heads=dense.num_attention_heads,
        num_key_value_heads=dense.num_key_value_heads,
        head_size=dense.head_size,
        vocab_size=dense.vocab_size,
        sliding_window=options.sliding_window,
        rms_norm_eps=dense.rms_norm_eps,
        rope_theta=dense.rope_theta,
        # Factor 1 also makes YaRN's factor of cos and sin, 0.1 ln(factor) + 1, equal to 1.
        yarn_factor=1.0,
        yarn_original_length=dense.max_length,
        yarn_beta_fast=rotations_of_slowest,
        yarn_beta_slow=rotations_of_slowest / math.sqrt(dense.rope_theta),
        max_length=dense.max_length,
        initializer_std=dense.initializer_std,
    )


def _without_dense_keys(extras: ModelExtras) -> ModelExtras:
    """Return extras without keys of config.json that only the dense families have."""
    # The other keys describe the source's architecture and would have no meaning for GPT-OSS.
    known = GptOssModelConfig.hf_keys.copied_from(dict(extras.config))
    return ModelExtras(extras.files, extras.generation, known)


# -- measurement -----------------------------------------------------------------------------------


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
    windowed.routers = [
        _router_weight(config, options, layer) for layer in range(config.num_layers)
    ]
    upcycled_loss = _loss(windowed, tokens, partial(report_pass, 2))

    biases = [_balancing_bias(logits, config) for logits in windowed.router_logits]
    loads = torch.stack(
        [
            _expert_loads(logits + bias, config)
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
    wanted = TARGET_PEAK / peak.double().clamp_min(SMALLEST_PEAK)
    return torch.exp2(wanted.log2().floor())


def _expert_loads(logits: Tensor, config: GptOssModelConfig) -> Tensor:
    """Return the load of each expert, [experts]. 1 is an even share of the tokens.

    Args:
        logits: router logits with the bias, [tokens, experts].
        config: architecture of the upcycled model.
    """
    chosen = logits.topk(config.experts_per_token, dim=-1).indices
    counts = torch.bincount(chosen.flatten(), minlength=config.num_experts).double()
    return counts / counts.mean()


def _balancing_bias(logits: Tensor, config: GptOssModelConfig) -> Tensor:
    """Return the router's bias with which all experts have about equal loads, [experts].

    As in balancing without an auxiliary loss (arXiv 2408.15664): the bias of an expert rises while
    its load is too small.

    Args:
        logits: router logits without bias, [tokens, experts].
        config: architecture of the upcycled model.
    """
    logits = logits.double()
    # Most of the imbalance: logits of all tokens have a common part.
    bias = -logits.mean(dim=0)
    spread = (logits + bias).std()
    for step in range(BALANCING_STEPS):
        # Relative to the spread of the logits, which depends on the model. It falls to 0, because
        # with a constant rate the loads would oscillate.
        rate = BALANCING_RATE * spread * (1 - step / BALANCING_STEPS)
        bias += rate * (1 - _expert_loads(logits + bias, config))
    # A number that is added to all logits changes no choice and no weight.
    return bias - bias.mean()


# -- weights ---------------------------------------------------------------------------------------


def upcycled_tensors(
    source: HfDirectory,
    config: GptOssModelConfig,
    options: UpcycleOptions,
    measured: CalibrationResult,
    dtype: torch.dtype,
) -> Iterator[NamedTensor]:
    """Yield every tensor of the upcycled model by Hugging Face name, one layer in memory.

    Args:
        source: dense model.
        config: architecture of the upcycled model.
        options: properties of the upcycled model.
        measured: scales of ``up`` and biases of the routers.
        dtype: dtype of the tensors. They are computed in fp64.
    """
    dense = source.config
    assert isinstance(dense, DenseModelConfig)
    generator = torch.Generator()

    for name, shape in hf_shapes(config).items():
        # GPT-OSS has no tied embeddings, so the embedding is written twice.
        if name == "lm_head.weight" and dense.tied_embeddings:
            yield name, source.get("model.embed_tokens.weight").to(dtype)
            continue
        if not name.startswith("model.layers."):
            yield name, source.get(name).to(dtype)
            continue

        _, _, number, part = name.split(".", 3)
        layer = int(number)
        # Seed every tensor separately, so that its values do not depend on the order.
        generator.manual_seed(_derive_seed(options.seed, name))
        if part.startswith("mlp.experts."):
            tensor = _experts(source, part, layer, measured.up_scales[layer], options, generator)
        elif part == "mlp.router.weight":
            # The weight with which ``measure`` has chosen the bias: it depends only on the seed and
            # the name.
            tensor = _router_weight(config, options, layer)
        elif part == "mlp.router.bias":
            tensor = measured.router_biases[layer]
        elif part == "self_attn.sinks":
            tensor = torch.full(shape, options.sink)
        # GPT-OSS has biases in all projections of attention, a dense model in some or none.
        elif part.endswith(".bias") and not _has_bias(dense, part):
            tensor = torch.zeros(shape)
        else:
            tensor = source.get(name)
        yield name, tensor.to(dtype)


def _router_weight(config: GptOssModelConfig, options: UpcycleOptions, layer: int) -> Tensor:
    """Return the random weight of a router, [experts, hidden_size]."""
    generator = torch.Generator()
    generator.manual_seed(_derive_seed(options.seed, f"model.layers.{layer}.mlp.router.weight"))
    shape = (config.num_experts, config.hidden_size)
    return torch.randn(shape, generator=generator) * options.router_std


def _has_bias(dense: DenseModelConfig, part: str) -> bool:
    """Return True if the dense model has this bias of a layer."""
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return dense.has_qkv_bias and part.startswith(projections)


def _experts(
    source: HfDirectory,
    part: str,
    layer: int,
    up_scale: Tensor,
    options: UpcycleOptions,
    generator: torch.Generator,
) -> Tensor:
    """Return a stacked tensor of the experts, fp64 [experts, ...].

    Args:
        source: dense model.
        part: name of the tensor without the prefix of the layer.
        layer: 0-based layer.
        up_scale: scale of every ``up`` channel, fp64 [intermediate_size].
        options: number of experts and noise.
        generator: source of the noise.
    """

    def copies(name: str) -> Tensor:
        """Return a copy of a dense matrix per expert with its own noise, [experts, in, out]."""
        matrix = source.get(f"model.layers.{layer}.mlp.{name}_proj.weight").double().T
        experts = matrix.expand(options.num_experts, *matrix.shape)
        if options.expert_noise == 0:
            return experts
        # Added before the scales, so that its size relative to the weights is equal in all
        # channels.
        noise = torch.randn(experts.shape, generator=generator)
        return experts + noise.double() * (options.expert_noise * matrix.std())

    if part == "mlp.experts.gate_up_proj":
        gate = copies("gate") / SWISH_SLOPE
        up = copies("up") * up_scale
        return torch.stack((gate, up), dim=-1).flatten(-2)  # gate and up channels alternate
    if part == "mlp.experts.gate_up_proj_bias":
        # The activation adds 1 to ``up``, and this bias takes it away.
        bias = torch.zeros(len(up_scale), 2)
        bias[:, 1] = -1
        return bias.flatten().expand(options.num_experts, -1)
    if part == "mlp.experts.down_proj":
        return copies("down") * (SWISH_SLOPE / up_scale)[:, None]
    assert part == "mlp.experts.down_proj_bias", part
    return torch.zeros(options.num_experts, source.config.hidden_size)


def _derive_seed(seed: int, name: str) -> int:
    """Return a seed for one tensor."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)


def _with_progress(
    tensors: Iterator[NamedTensor],
    config: GptOssModelConfig,
    dtype: torch.dtype,
    progress: Progress | None,
) -> Iterator[NamedTensor]:
    """Yield the tensors, and report the bytes that the consumer has taken so far."""
    total = sum(math.prod(shape) for shape in hf_shapes(config).values()) * dtype.itemsize
    done = 0
    for name, tensor in tensors:
        size = tensor.nbytes
        yield name, tensor
        done += size
        if progress is not None:
            progress(done, total)
