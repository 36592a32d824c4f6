"""Typed configuration of the policy: architecture, parallel layout, optimizer.

Every model is strict: an unknown key, a wrong type or an impossible layout raises pydantic's
ValidationError, which names the key, before anything is started."""

import json
import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_gptoss.rope_scaling import RopeScaling


class StrictModel(BaseModel):
    """Base of all configuration.

    Unknown keys are errors; fields are documented by the string under them.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)


AdapterTarget = Literal["q", "k", "v", "o", "experts", "router", "embedding", "head"]
"""Weights that can have adapters: of every layer, and the embedding and the output layer."""
Quantization = Literal["mxfp4"]
"""Formats that experts are trained through."""


class ModelConfig(StrictModel, ABC):
    """An architecture: what every family of models says of itself.

    A family is a subclass with its own fields, readable by ``megatron_gptoss.families.registry``.
    The formulas of memory, time and layouts know models by these properties alone.
    """

    adapter_targets: ClassVar[tuple[AdapterTarget, ...]] = ()
    """Weights of this family that adapters are built for."""
    quantizations: ClassVar[tuple[Quantization, ...]] = ()
    """Formats that this family's experts can be trained through or held in."""
    hf_model_types: ClassVar[tuple[str, ...]]
    """Values of ``model_type`` in config.json that this family reads."""
    default_vocabulary: ClassVar[Literal["gptoss", "tokenizer"]] = "tokenizer"
    """Token ids of a run that names none: the released ones of GPT-OSS, or those of the checkpoint's
    tokenizer."""

    model_type: str
    """The family, by the name that Hugging Face's config.json has for it."""
    num_layers: int = Field(gt=0)
    """Transformer layers."""
    num_experts: int = Field(0, ge=0)
    """Experts per layer; 0 where a layer has one MLP for all tokens."""
    experts_per_token: int = Field(0, ge=0)
    """Experts each token is routed to."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(gt=0)
    """Width inside one MLP or expert, after the gated linear unit."""
    num_attention_heads: int = Field(gt=0)
    """Query heads."""
    num_key_value_heads: int = Field(gt=0)
    """Key/value heads; query heads are shared out among them evenly."""
    head_size: int = Field(gt=0)
    """Channels per head; need not be hidden_size / num_attention_heads."""
    vocab_size: int = Field(gt=0)
    """Rows of the embedding and of the output layer."""
    sliding_window: int | None = Field(None, gt=0)
    """Keys a token of a window layer sees, itself included; null where no layer has a window."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of all RMSNorms."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary frequencies."""
    max_length: int = Field(gt=0)
    """Longest sequence, in tokens."""
    initializer_std: float = Field(0.02, gt=0)
    """Standard deviation of randomly initialised weights; unused when weights are loaded."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size ({self.head_size}) must be even for rotary embeddings")
        return self

    # -- what a family says --------------------------------------------------------------------

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output layer is the embedding."""
        return False

    @property
    def rope_frequencies(self) -> RopeScaling | None:
        """How the rotary frequencies are stretched; None: not at all."""
        return None

    @property
    def layer_types(self) -> list[str]:
        """Per layer "sliding_attention" or "full_attention", as in the Hugging Face config."""
        return ["full_attention"] * self.num_layers

    @property
    def windowed_share(self) -> float:
        """Share of the layers that attend within a window, for estimates."""
        return 0.0

    @property
    def mlps_per_token(self) -> int:
        """MLPs that a token passes through in a layer: its experts, or the one that all share."""
        return self.experts_per_token if self.num_experts else 1

    @property
    def expert_parameters(self) -> int:
        """Weights and biases of one expert; 0 in a model without."""
        return 0

    @abstractmethod
    def layer_parameters(self, tensor: int = 1) -> float:
        """Count the parameters of a layer, without experts, on one of ``tensor`` tensor-parallel
        ranks."""

    @abstractmethod
    def to_hf_config(self, **extra: Any) -> dict[str, Any]:
        """Return the content of ``config.json``; ``extra`` adds keys such as eos_token_id."""

    @classmethod
    @abstractmethod
    def from_hf_dict(cls, raw: dict[str, Any], where: str) -> Self:
        """Read a parsed ``config.json``; ``where`` names it in errors.

        Raises:
            ValueError: naming the key that is missing or unsupported.
        """

    # -- what follows from it ------------------------------------------------------------------

    @property
    def query_size(self) -> int:
        """Channels of a token's queries, all heads together."""
        return self.num_attention_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Channels of a token's keys, all heads together; its values have as many."""
        return self.num_key_value_heads * self.head_size

    @property
    def num_parameters(self) -> int:
        """All of them, embedding and output layer included; tied ones once."""
        layer = int(self.layer_parameters()) + self.num_experts * self.expert_parameters
        vocabularies = 1 if self.tied_embeddings else 2
        vocabulary = vocabularies * self.vocab_size * self.hidden_size
        return self.num_layers * layer + vocabulary + self.hidden_size

    @classmethod
    def from_hf_config(cls, source: Path | str | dict[str, Any]) -> Self:
        """Read ``config.json`` of this family: a file, its directory, or the parsed dict.

        ``families.registry.read_hf_config`` reads that of any family.

        Raises:
            ValueError: naming the file and the key that is missing or unsupported.
        """
        raw, where = load_hf_config(source)
        model_type = raw.get("model_type")
        if model_type not in cls.hf_model_types:
            expected = " or ".join(repr(name) for name in cls.hf_model_types)
            raise ValueError(f"{where}: model_type is {model_type!r}, expected {expected}")
        return cls.from_hf_dict(raw, where)


def load_hf_config(source: Path | str | dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Load a ``config.json``: a file, its directory, or the parsed dict.

    Returns:
        The content, and what errors call it.

    Raises:
        ValueError: naming the file that is missing or no JSON.
    """
    if isinstance(source, dict):
        return source, "config"

    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    return _read_json(path), str(path)


def rope_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a parsed ``config.json``, whichever version of transformers
    wrote it: rope_theta, and what rope_scaling says."""
    # transformers 5 writes rope_parameters, the releases carry rope_scaling and rope_theta.
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    if "rope_theta" in raw:
        rope.setdefault("rope_theta", raw["rope_theta"])
    return rope


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; expected a Hugging Face model directory") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    return content


class AdapterConfig(StrictModel):
    """Low-rank adapters (LoRA, arXiv 2106.09685): every target's weight is W + alpha / rank * B A.

    Only A [rank, in] and B [out, rank] are trained; all else, biases and norms too, is frozen.
    """

    rank: int = Field(32, gt=0)
    """Rank of all updates but those of experts."""
    alpha: float = Field(32.0, gt=0)
    """An update is scaled by alpha over its rank."""
    expert_rank: int | None = Field(None, gt=0)
    """Rank of the update of each expert's matrices; null for rank / experts_per_token, at least 1:
    as many trained parameters per token as in a dense layer."""
    targets: tuple[AdapterTarget, ...] = ("q", "k", "v", "o", "experts")
    """Weights with adapters: q, k, v and o, the projections of attention; experts, the gate, up and
    down projection of each; router; embedding; head, the output layer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.targets:
            raise ValueError("adapter.targets is empty: nothing would be trained")
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"adapter.targets names a target twice: {', '.join(self.targets)}")
        if self.expert_rank is not None and "experts" not in self.targets:
            raise ValueError(
                f"adapter.expert_rank ({self.expert_rank}) has no effect: adapter.targets "
                "does not have experts"
            )
        return self

    def rank_of_experts(self, model: ModelConfig) -> int:
        """Return the rank of the updates of experts."""
        return self.expert_rank or max(1, self.rank // model.experts_per_token)

    def layer_parameters(self, model: ModelConfig, tensor: int = 1) -> tuple[int, int]:
        """Count what one layer's adapters have on one of ``tensor`` tensor-parallel ranks.

        Returns:
            The parameters for attention and router, and those for one expert.
        """
        hidden = model.hidden_size
        # One factor has the side that ranks split, the other one is whole.
        sizes = {
            "q": hidden + model.query_size // tensor,
            "k": hidden + model.key_size // tensor,
            "v": hidden + model.key_size // tensor,
            "o": hidden + model.query_size // tensor,
            "router": hidden + model.num_experts,
        }
        dense = self.rank * sum(size for target, size in sizes.items() if target in self.targets)

        expert = 0
        if "experts" in self.targets:
            gate_and_up = hidden + 2 * model.intermediate_size
            down = model.intermediate_size + hidden
            expert = self.rank_of_experts(model) * (gate_and_up + down)
        return dense, expert

    def vocabulary_parameters(self, model: ModelConfig, target: str, tensor: int = 1) -> int:
        """Count those of the embedding's or the head's adapter (``target``) on one of ``tensor``
        ranks; 0 if it has none."""
        if target not in self.targets:
            return 0
        return self.rank * (model.hidden_size + model.vocab_size // tensor)

    def num_parameters(self, model: ModelConfig) -> int:
        """Count the parameters of all adapters of ``model``: all that is trained."""
        dense, expert = self.layer_parameters(model)
        layers = model.num_layers * (dense + model.num_experts * expert)
        vocabulary = [self.vocabulary_parameters(model, name) for name in ("embedding", "head")]
        return layers + sum(vocabulary)

    def difference(self, other: "AdapterConfig", model: ModelConfig) -> tuple[str, str, str] | None:
        """Find what makes the adapters of another configuration other ones, in ``model``.

        Returns:
            A key, its value here and its value there; None where shapes, scales and targets agree,
            however they are written.
        """
        here = self._as_built(model)
        there = other._as_built(model)
        for key, value in here.items():
            if there[key] != value:
                return f"adapter.{key}", value, there[key]
        return None

    def _as_built(self, model: ModelConfig) -> dict[str, str]:
        """Return what decides on shapes and scales; "none" where a key has no effect."""
        has_experts = "experts" in self.targets
        has_others = set(self.targets) != {"experts"}
        return {
            "targets": ", ".join(sorted(self.targets)),
            "rank": str(self.rank) if has_others else "none",
            "expert_rank": str(self.rank_of_experts(model)) if has_experts else "none",
            "alpha": str(self.alpha),
        }

    def check_ranks(self, model: ModelConfig) -> None:
        """Raise ValueError naming the target that ``model`` lacks, or that is too small for its
        rank."""
        narrowest_sides = {
            "q": min(model.query_size, model.hidden_size),
            "k": min(model.key_size, model.hidden_size),
            "v": min(model.key_size, model.hidden_size),
            "o": min(model.query_size, model.hidden_size),
            "experts": min(model.intermediate_size, model.hidden_size),
            "router": min(model.num_experts, model.hidden_size),
            "embedding": min(model.vocab_size, model.hidden_size),
            "head": min(model.vocab_size, model.hidden_size),
        }
        for target in self.targets:
            if target not in model.adapter_targets:
                available = ", ".join(model.adapter_targets) or "none"
                raise ValueError(
                    f"adapter.targets: {target} of a {model.model_type} model cannot be adapted; "
                    f"available: {available}"
                )
            if target == "experts":
                key, rank = "adapter.expert_rank", self.rank_of_experts(model)
            else:
                key, rank = "adapter.rank", self.rank
            if rank > narrowest_sides[target]:
                raise ValueError(
                    f"{key} ({rank}) exceeds the smaller side ({narrowest_sides[target]}) of what "
                    f"target {target} adapts: use a smaller rank or leave the target out"
                )


class ParallelConfig(StrictModel):
    """How the policy is spread over trainer ranks."""

    world_size: int = Field(1, gt=0)
    """Trainer ranks in all; what tensor, pipeline and context parallelism leave over is data
    parallel."""
    tensor: int = Field(1, gt=0)
    """Tensor parallel size. Above 1, sequence parallelism is on (Megatron requires it for
    mixtures of experts)."""
    pipeline: int = Field(1, gt=0)
    """Pipeline stages."""
    last_stage_layers: int | None = Field(None, gt=0)
    """Layers of the last pipeline stage, the others share the rest evenly; null for equally
    many in all. The last stage also has the output layer, as much work as about four layers."""
    virtual_pipeline: int = Field(1, gt=0)
    """Model chunks per pipeline rank. Above 1, the interleaved schedule runs them: its bubble
    is that many times shorter, it sends that many times more between stages, and each rank's
    number of micro-batches is rounded up to a multiple of pipeline."""
    context: int = Field(1, gt=0)
    """Context parallel size: ranks that share the tokens of one packed batch. Any size; a power
    of two if in doubt."""
    context_scheme_full: Literal["auto", "all_to_all", "all_gather"] = "auto"
    """How full-attention layers communicate under context parallelism; auto takes what the cost
    model finds cheapest for each row (``gptoss plan`` prints it)."""
    context_scheme_window: Literal["auto", "all_to_all", "halo"] = "auto"
    """The same for sliding-window layers."""
    context_bandwidth: float = Field(300.0, gt=0)
    """GB/s that a GPU sends to its context-parallel peers, for the cost model. The default is
    NVLink between H200s; set it to what the network between nodes gives where context-parallel
    ranks are spread over nodes."""
    attention_tflops: float = Field(525.0, gt=0)
    """TFLOP/s of full attention on one GPU, for the cost model. The default is flash-attn-4 on
    an H200."""
    expert: int = Field(1, gt=0)
    """Expert parallel size: ranks among which the experts of a layer are shared out."""
    expert_dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    """What sends tokens to their experts and back. deepep
    (https://github.com/deepseek-ai/DeepEP), which you install yourself, permutes and sends in
    one kernel; it needs GPUs and is meant for experts spread over nodes."""
    base: Literal["bf16", "mxfp4"] = "bf16"
    """How the experts' weights are held while adapters are trained: in the model's dtype, or packed
    in MXFP4, a quarter of the memory, to be dequantised for every product. Only frozen weights can
    be packed."""
    recompute: tuple[Literal["moe_act", "layernorm", "core_attn", "moe"], ...] = ()
    """On GPUs: what the backward pass computes again instead of keeping it. moe_act (the expert
    activation) costs next to nothing and saves a sixth of the activations, layernorm likewise
    less; moe is the last resort."""
    recompute_layers: int | None = Field(None, ge=0)
    """The layers of a pipeline stage's chunk that do so, its first ones; null: all."""

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def micro_batch_multiple(self) -> int:
        """Each data-parallel rank takes a multiple of so many micro-batches.

        The interleaved schedule asks for it.
        """
        return self.pipeline if self.virtual_pipeline > 1 else 1

    @property
    def sizes(self) -> str:
        """The layout as people write it: "tensor 2, pipeline 1, context 1, expert 8"."""
        names = ("tensor", "pipeline", "context", "expert")
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)

    def layers_of_stage(self, stage: int, model: ModelConfig) -> int:
        """Return how many layers a pipeline stage has."""
        # The stages before the last share the remaining layers evenly (see check_layout).
        last = self.last_stage_layers or model.num_layers // self.pipeline
        if stage == self.pipeline - 1:
            return last
        return (model.num_layers - last) // (self.pipeline - 1)

    def check_layout(self, model: ModelConfig, adapter: AdapterConfig | None = None) -> None:
        """Raise ValueError naming the key that makes the layout impossible for ``model``.

        ``adapter``: what is trained; None for all parameters.
        """
        self._check_ranks()
        self._check_options(model)
        _check_divides("tensor", self.tensor, "num_key_value_heads", model.num_key_value_heads)
        _check_divides("tensor", self.tensor, "vocab_size", model.vocab_size)
        self._check_pipeline(model)
        self._check_experts(model)
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel.virtual_pipeline ({self.virtual_pipeline}) needs parallel.pipeline above 1"
            )
        self._check_context_schemes(model)
        self._check_base(model, adapter)
        if adapter is not None:
            self._check_stages(adapter)

    def _check_ranks(self) -> None:
        """Every dimension must split the ranks evenly."""
        dense_ranks = self.tensor * self.pipeline * self.context
        if self.world_size % dense_ranks:
            usable_ranks = max(1, self.world_size // dense_ranks) * dense_ranks
            raise ValueError(
                f"parallel.world_size ({self.world_size}) must be a multiple of "
                f"tensor x pipeline x context "
                f"({self.tensor} x {self.pipeline} x {self.context} = {dense_ranks}): use "
                f"{usable_ranks} ranks, or another context; any context size can be split"
            )

        # Experts are spread over all ranks of a stage, whatever else those share.
        stage_ranks = self.world_size // self.pipeline
        if stage_ranks % self.expert:
            raise ValueError(
                f"parallel.expert ({self.expert}) must divide world_size / pipeline ({stage_ranks})"
            )

    def _check_experts(self, model: ModelConfig) -> None:
        """What is about experts needs a model that has them."""
        if model.num_experts:
            _check_divides("expert", self.expert, "num_experts", model.num_experts)
            return

        if self.expert > 1:
            raise ValueError(
                f"parallel.expert ({self.expert}) must be 1: a {model.model_type} model has no experts"
            )
        without_effect = [part for part in self.recompute if part != "core_attn"]
        if without_effect:
            raise ValueError(
                f"parallel.recompute {', '.join(without_effect)} has no effect: a "
                f"{model.model_type} model has no experts, and its norms are part of its linear layers"
            )

    def _check_options(self, model: ModelConfig) -> None:
        """No option may be set that cannot have an effect."""
        if self.recompute_layers is not None and not self.recompute:
            raise ValueError(
                "parallel.recompute_layers has no effect: parallel.recompute does not say what they do"
            )
        if self.expert_dispatcher == "deepep" and self.expert == 1:
            raise ValueError(
                "parallel.expert_dispatcher deepep has nobody to send to: parallel.expert is 1"
            )

        last = self.last_stage_layers
        layers = model.num_layers
        if last is not None and (self.pipeline == 1 or self.virtual_pipeline > 1 or last >= layers):
            raise ValueError(
                f"parallel.last_stage_layers ({last}) needs parallel.pipeline above 1, "
                f"virtual_pipeline 1 and to be less than num_layers ({layers})"
            )

    def _check_pipeline(self, model: ModelConfig) -> None:
        """All chunks must have equally many layers, but for a last stage that is set apart."""
        layers = model.num_layers
        if self.last_stage_layers is None:
            chunks = self.pipeline * self.virtual_pipeline
            _check_divides("pipeline", self.pipeline, "num_layers", layers)
            _check_divides("pipeline x virtual_pipeline", chunks, "num_layers", layers)
        else:
            _check_divides(
                "pipeline less the last stage",
                self.pipeline - 1,
                "num_layers - last_stage_layers",
                layers - self.last_stage_layers,
            )

    def _check_context_schemes(self, model: ModelConfig) -> None:
        """all_to_all gives every context-parallel rank equally many heads."""
        heads = model.num_attention_heads // self.tensor
        if heads % self.context == 0:
            return

        alternatives = {"full": "all_gather", "window": "halo"}
        for kind, alternative in alternatives.items():
            if getattr(self, f"context_scheme_{kind}") != "all_to_all":
                continue
            divisors = [size for size in range(1, self.context + 1) if heads % size == 0]
            sizes = ", ".join(str(size) for size in divisors)
            raise ValueError(
                f"parallel.context_scheme_{kind} all_to_all needs parallel.context "
                f"({self.context}) to divide num_attention_heads / tensor ({heads}): "
                f"use context {sizes}, or {alternative}, which takes any"
            )

    def _check_stages(self, adapter: AdapterConfig) -> None:
        """Every pipeline stage must have something to train."""
        if self.pipeline > 1 and set(adapter.targets) <= {"embedding", "head"}:
            raise ValueError(
                f"adapter.targets ({', '.join(adapter.targets)}) leave pipeline stages with nothing "
                f"to train: use parallel.pipeline 1 instead of {self.pipeline}, or add a target of "
                "the layers, such as q"
            )

    def _check_base(self, model: ModelConfig, adapter: AdapterConfig | None) -> None:
        """MXFP4 holds frozen weights only, in blocks of 32 values."""
        if self.base == "bf16":
            return
        if adapter is None:
            raise ValueError(
                f"parallel.base {self.base} needs an adapter: weights in four bits are frozen, and "
                "without an adapter all weights are trained (quantization: mxfp4 trains them through "
                "four bits)"
            )
        check_blocks("parallel.base", self.base, model)


def check_quantization(
    quantization: Quantization | None, model: ModelConfig, adapter: AdapterConfig | None
) -> None:
    """Raise ValueError naming the key that keeps experts from being trained through four bits."""
    if quantization is None:
        return
    if adapter is not None:
        raise ValueError(
            f"quantization {quantization} trains all weights, and adapter freezes them: an expert "
            "merged with its adapter is no value that four bits hold. Leave one of them out; "
            "parallel.base mxfp4 is for a frozen base in four bits"
        )
    check_blocks("quantization", quantization, model)


def check_blocks(key: str, quantization: Quantization | None, model: ModelConfig) -> None:
    """Raise ValueError if a ``key`` that asks for MXFP4 does not suit the widths of ``model``."""
    if quantization is None:
        return
    if quantization not in model.quantizations:
        raise ValueError(
            f"{key} {quantization}: a {model.model_type} model has no experts to hold it"
        )
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(model, name)
        if size % 32:
            raise ValueError(
                f"{key} {quantization} needs {name} ({size}) to be a multiple of 32, the values "
                "that share a scale"
            )


def _check_divides(key: str, size: int, name: str, count: int) -> None:
    if count % size:
        raise ValueError(f"parallel.{key} ({size}) must divide {name} ({count})")


class OptimizerConfig(StrictModel):
    """AdamW with a warm-up."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; biases, norms and sinks have none."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.98, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest global gradient norm; larger gradients are scaled down to it."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up; cosine falls to a tenth of the peak at the last step."""
    on_non_finite: Literal["skip", "stop"] = "skip"
    """What a gradient with NaN or infinity does: skip the step with a warning, or stop the run;
    both name it."""
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    """On GPUs: dtype in which gradients are added up over micro-batches and ranks. bf16 saves 2
    bytes per parameter and loses digits with every micro-batch."""
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """On GPUs: dtype of Adam's moments. bf16 saves 4 bytes per parameter; master weights stay
    exact either way."""
    offload: float = Field(0.0, ge=0, le=1)
    """Share of the optimizer's state that rests in pinned host memory and comes to the GPU for
    every step, where the activations were. The numbers stay the same. A last resort: copying
    takes longer than the step itself."""

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Return the learning rate of a 0-based optimizer step.

        It rises linearly over the warm-up, then stays or falls as a cosine to a tenth.
        """
        # Step 0 counts as one: a learning rate of 0 would waste its batch.
        if step < self.warmup_steps or self.schedule == "constant":
            return self.lr * min(1.0, (step + 1) / max(1, self.warmup_steps))

        progress = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.lr * (0.1 + 0.9 * cosine)
