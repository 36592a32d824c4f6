"""Architecture of GPT-OSS."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter, field_validator, model_validator

from megatron_gptoss.config import (
    AdapterTarget,
    HfKeys,
    ModelConfig,
    Quantization,
    check_layer_types,
    derived_head_size,
    read_rope,
)
from megatron_gptoss.rope_scaling import YarnScaling

_ROPE_NAMES = {
    "yarn_factor": "factor",
    "yarn_original_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Key of each field among the rotary settings of ``config.json``."""
_QUANTIZATION_KEYS = {"quant_method", "modules_to_not_convert", "dequantize"}
_EXPERT_PATTERN = "experts"
SWIGLU_LIMIT = 7.0
"""Clamp of the SwiGLU inputs in the released models."""
RELEASED_VOCABULARY = 201_088
"""Number of token ids in GPT-OSS-20B and 120B."""


class GptOssModelConfig(ModelConfig):
    """GPT-OSS architecture. Defaults are the values that the released 20B and 120B models share."""

    adapter_targets: ClassVar[tuple[AdapterTarget, ...]] = (
        "q", "k", "v", "o", "experts", "router", "embedding", "head",
    )  # fmt: skip
    quantizations: ClassVar[tuple[Quantization, ...]] = ("mxfp4",)
    hf_model_types: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    hf_keys: ClassVar[HfKeys] = HfKeys(
        fields={
            "num_hidden_layers": "num_layers",
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "experts_per_token",
            "hidden_size": "hidden_size",
            "intermediate_size": "intermediate_size",
            "num_attention_heads": "num_attention_heads",
            "num_key_value_heads": "num_key_value_heads",
            "head_dim": "head_size",
            "vocab_size": "vocab_size",
            "sliding_window": "sliding_window",
            "swiglu_limit": "swiglu_limit",
            "rms_norm_eps": "rms_norm_eps",
            "max_position_embeddings": "max_length",
            "initializer_range": "initializer_std",
        },
        optional=frozenset({
            "swiglu_limit", "rms_norm_eps", "max_position_embeddings", "initializer_range",
        }),
        nullable=frozenset({"num_key_value_heads", "head_dim"}),
        aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        fixed={
            "architectures": (["GptOssForCausalLM"],),
            "attention_bias": (True,),
            "hidden_act": ("silu",),
            # The sigmoid's slope, which the kernels contain as a constant.
            "swiglu_alpha": (1.702,),
            "tie_word_embeddings": (False,),
        },
        checked=frozenset({"initial_context_length", "layer_types", "quantization_config"}),
        copied=frozenset({"output_router_logits", "router_aux_loss_coef"}),
    )  # fmt: skip

    model_type: Literal["gpt_oss"] = "gpt_oss"
    """Name of the family."""
    num_layers: int = Field(gt=0)
    """Number of transformer layers. Layers 0, 2, 4, ... have a sliding window; layers 1, 3, 5, ...
    attend to all earlier tokens.
    """
    num_experts: int = Field(gt=0)
    """Experts per layer."""
    experts_per_token: int = Field(4, gt=0)
    """Experts to which each token is routed. The router's softmax is over these experts only."""
    hidden_size: int = Field(2880, gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(2880, gt=0)
    """Inner width of an expert, after the gated linear unit."""
    num_attention_heads: int = Field(64, gt=0)
    """Number of query heads."""
    num_key_value_heads: int = Field(8, gt=0)
    """Number of key/value heads, a divisor of num_attention_heads."""
    head_size: int = Field(64, gt=0)
    """Channels per head. May differ from hidden_size / num_attention_heads."""
    vocab_size: int = Field(RELEASED_VOCABULARY, gt=0)
    """Rows of embedding and output layer (untied)."""
    sliding_window: int = Field(128, gt=0)
    """Keys that a token sees in window layers, including its own."""
    swiglu_limit: float = SWIGLU_LIMIT
    """Clamp of the SwiGLU inputs. Only 7 is possible."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of all RMSNorms."""
    rope_theta: float = Field(150_000.0, gt=0)
    """Base of the rotary frequencies."""
    yarn_factor: float = Field(32.0, ge=1)
    """YaRN context extension factor (arXiv 2309.00071)."""
    yarn_original_length: int = Field(4096, gt=0)
    """Context length before extension, in tokens."""
    yarn_beta_fast: float = Field(32.0, gt=0)
    """Number of rotations above which a frequency is not changed."""
    yarn_beta_slow: float = Field(1.0, gt=0)
    """Number of rotations below which a frequency is fully interpolated."""
    max_length: int = Field(131_072, gt=0)
    """Maximum sequence length in tokens."""

    @field_validator("swiglu_limit")
    @classmethod
    def _check_limit(cls, limit: float) -> float:
        """Reject other clamps than the clamp of the released models."""
        # transformers ignores the value and SGLang uses it, so they would compute two models.
        if limit != SWIGLU_LIMIT:
            raise ValueError(
                f"swiglu_limit must be {SWIGLU_LIMIT:g}. For other values transformers 5.12, which "
                "ignores the key, and SGLang, which uses it, would compute different models"
            )
        return limit

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        """Reject more experts per token than there are experts."""
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token ({self.experts_per_token}) exceeds num_experts "
                f"({self.num_experts})"
            )
        return self

    @property
    def default_vocabulary(self) -> Literal["gptoss", "tokenizer"]:
        """Default vocabulary: the released models' vocabulary if the size is theirs."""
        return "gptoss" if self.vocab_size == RELEASED_VOCABULARY else "tokenizer"

    @property
    def rope_frequencies(self) -> YarnScaling:
        """YaRN scaling with a ramp that is not rounded."""
        return YarnScaling(
            factor=self.yarn_factor,
            original_max_position_embeddings=self.yarn_original_length,
            beta_fast=self.yarn_beta_fast,
            beta_slow=self.yarn_beta_slow,
            truncate=False,
        )

    @property
    def layer_types(self) -> list[str]:
        """Type of each layer, "sliding_attention" or "full_attention", as in config.json."""
        # The order of the released models. Files with another order are rejected.
        pair = ("sliding_attention", "full_attention")
        return [pair[layer % 2] for layer in range(self.num_layers)]

    @property
    def windowed_share(self) -> float:
        """Fraction of layers with sliding-window attention."""
        return 0.5

    @property
    def expert_parameters(self) -> int:
        """Parameters per expert: weights and biases."""
        # Gate and up projections are one matrix.
        gate_and_up = (self.hidden_size + 1) * 2 * self.intermediate_size
        down = (self.intermediate_size + 1) * self.hidden_size
        return gate_and_up + down

    def layer_parameters(self, tensor: int = 1) -> float:
        """Return a layer's number of parameters on one rank, without experts.

        ``tensor`` is the tensor-parallel size.
        """
        hidden = self.hidden_size

        # Tensor parallelism splits the projections. Every rank has the bias of the output
        # projection, two norms and the router. Sinks are counted as if they were not split.
        projections = (hidden + 1) * (self.query_size + 2 * self.key_size) / tensor
        output_projection = (self.query_size / tensor + 1) * hidden
        attention = projections + output_projection
        router = (hidden + 1) * self.num_experts
        return attention + self.num_attention_heads + 2 * hidden + router

    def to_hf_config(self, **extra: Any) -> dict[str, Any]:
        """Return the content of ``config.json``, with ``extra`` keys such as eos_token_id."""
        keys = {name: key for key, name in self.hf_keys.fields.items()}
        fields = {}
        for name, value in self.model_dump().items():
            if name not in _ROPE_NAMES:
                fields[keys.get(name, name)] = value

        # transformers rounds the ramp unless this is written.
        rope_scaling = {"rope_type": "yarn", "truncate": False}
        for name, key in _ROPE_NAMES.items():
            rope_scaling[key] = getattr(self, name)

        return {
            "architectures": ["GptOssForCausalLM"],
            **fields,
            # A second spelling that the released files have, next to num_experts_per_tok.
            "experts_per_token": self.experts_per_token,
            "layer_types": self.layer_types,
            "rope_scaling": rope_scaling,
            "initial_context_length": self.yarn_original_length,
            "attention_bias": True,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "use_cache": True,
            **extra,
        }

    @classmethod
    def from_hf_dict(cls, raw: dict[str, Any], where: str) -> Self:
        """Read a parsed ``config.json``.

        Args:
            raw: parsed content.
            where: name of the file in errors.

        Raises:
            ValueError: a key is missing or unsupported. The message names it.
        """
        fields = cls.hf_keys.read(raw, where)
        _check_quantization(raw.get("quantization_config"), where)
        # The defaults of transformers for keys that are null.
        fields.setdefault("num_key_value_heads", raw["num_attention_heads"])
        if "head_size" not in fields:
            fields["head_size"] = derived_head_size(raw, where)

        rope = read_rope(raw, where)
        if rope.theta is not None:
            fields["rope_theta"] = rope.theta
        if rope.scaling["rope_type"] != "yarn":
            raise ValueError(
                f"{where}: {rope.section}.rope_type must be 'yarn', got "
                f"{rope.scaling['rope_type']!r}. Other rotary embeddings are not supported for "
                "gpt_oss"
            )
        scaling = rope.build(TypeAdapter(YarnScaling), where)
        assert isinstance(scaling, YarnScaling)
        # A rounded ramp gives other frequencies, and the layers compute only one of the two.
        if scaling.truncate:
            raise ValueError(
                f"{where}: {rope.section}.truncate must be false, as in the released models"
            )
        for name, key in _ROPE_NAMES.items():
            fields[name] = getattr(scaling, key)
        config = cls.hf_keys.build(cls, fields, where)

        check_layer_types(raw, config, where)
        original_length = raw.get("initial_context_length")
        if original_length not in (None, config.yarn_original_length):
            raise ValueError(
                f"{where}: initial_context_length ({original_length!r}) and {rope.section}."
                f"original_max_position_embeddings ({config.yarn_original_length}) must be equal. "
                "Correct the wrong one"
            )
        return config


def _check_quantization(settings: Any, where: str) -> None:
    """Raise ValueError if ``quantization_config`` exists and is not MXFP4 for all experts."""
    if settings is None:
        return

    if not isinstance(settings, dict) or settings.get("quant_method") != "mxfp4":
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise ValueError(
            f"{where}: quantization_config.quant_method must be 'mxfp4', got {method!r}. Use the "
            "model in bf16 or MXFP4"
        )

    for key, value in settings.items():
        if key not in _QUANTIZATION_KEYS and value is not None:
            raise ValueError(
                f"{where}: quantization_config.{key} is unknown ({value!r}). Use the model in bf16 "
                "or MXFP4 as it was released"
            )

    # The released files list attention, router, embedding and output layer here.
    for module in settings.get("modules_to_not_convert") or ():
        if _EXPERT_PATTERN in str(module):
            raise ValueError(
                f"{where}: quantization_config.modules_to_not_convert names experts ({module!r}), "
                "and all experts are converted or none. Remove it"
            )


def openai_config(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return OpenAI's original ``config.json`` in Hugging Face's keys.

    Raises:
        ValueError: naming the key that is missing.
    """
    needed = (
        "num_experts",
        "experts_per_token",
        "initial_context_length",
        "rope_theta",
        "rope_scaling_factor",
        "rope_ntk_alpha",
        "rope_ntk_beta",
    )
    missing = [key for key in needed if key not in raw]
    if missing:
        raise ValueError(f"{where}: key {missing[0]!r} is missing")

    original_length = raw["initial_context_length"]
    factor = raw["rope_scaling_factor"]
    rope_keys = ("rope_theta", "rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta")
    return {
        **{key: value for key, value in raw.items() if key not in rope_keys},
        "model_type": "gpt_oss",
        "num_local_experts": raw["num_experts"],
        "num_experts_per_tok": raw["experts_per_token"],
        "rope_theta": raw["rope_theta"],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": factor,
            # OpenAI's names: alpha is the smaller number of rotations, and beta the larger one.
            "beta_slow": raw["rope_ntk_alpha"],
            "beta_fast": raw["rope_ntk_beta"],
            "original_max_position_embeddings": original_length,
            "truncate": False,
        },
        # OpenAI's file has no maximum. Hugging Face's file of the same release has this product.
        "max_position_embeddings": int(original_length * factor),
    }
