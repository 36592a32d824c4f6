"""What every architecture says of itself, whichever family it is of."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from megatron_gptoss.config.hf_config import HfKeys, load_hf_config
from megatron_gptoss.config.strict_model import StrictModel
from megatron_gptoss.rope_scaling import RopeScaling

AdapterTarget = Literal["q", "k", "v", "o", "experts", "router", "embedding", "head"]
"""Weights that can have adapters: of every layer, and the embedding and the output layer."""
Quantization = Literal["mxfp4"]
"""Formats that experts are trained through."""

UPPER_BOUNDS = {
    "num_layers": 1024,
    "num_experts": 4096,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_size": 1 << 14,
    "vocab_size": 1 << 24,
    "max_length": 1 << 31,
}
"""Largest values by field. Memory grows with them, and untrusted files may have any number."""
MAX_MATRICES = 1 << 16
"""Largest product of layers and experts. Tables of tensors have that many entries."""
MAX_ATTENTION_WIDTH = 1 << 20
"""Largest product of query heads and head size."""


class ModelConfig(StrictModel, ABC):
    """An architecture: what every family of models says of itself.

    A family is a subclass with its own fields, readable by ``megatron_gptoss.families.registry``.
    The formulas of memory, time and layouts know models by these properties alone.
    """

    # Infinity and NaN are valid in Python's JSON.
    model_config = ConfigDict(allow_inf_nan=False)

    adapter_targets: ClassVar[tuple[AdapterTarget, ...]] = ()
    """Weights of this family that adapters are built for."""
    quantizations: ClassVar[tuple[Quantization, ...]] = ()
    """Formats that this family's experts can be trained through or held in."""
    hf_model_types: ClassVar[tuple[str, ...]]
    """Values of ``model_type`` in config.json that this family reads."""
    hf_keys: ClassVar[HfKeys]
    """Keys of config.json that this family reads. All others are rejected."""
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

    @field_validator("*")
    @classmethod
    def _check_bound(cls, value: Any, info: ValidationInfo) -> Any:
        bound = UPPER_BOUNDS.get(info.field_name or "")
        if bound is not None and value > bound:
            raise ValueError(f"exceeds {bound:,}, the largest value that is accepted")
        return value

    @model_validator(mode="after")
    def _check_products(self) -> Self:
        if self.num_layers * self.num_experts > MAX_MATRICES:
            raise ValueError(
                f"num_layers ({self.num_layers}) times num_experts ({self.num_experts}) exceeds "
                f"{MAX_MATRICES:,}"
            )
        if self.query_size > MAX_ATTENTION_WIDTH:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) times head_size "
                f"({self.head_size}) exceeds {MAX_ATTENTION_WIDTH:,}"
            )
        return self

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


def derived_head_size(raw: dict[str, Any], where: str) -> int:
    """Return the head size of a ``config.json`` without head_dim.

    Raises:
        ValueError: naming the key that is not a positive integer.
    """
    sizes = []
    for key in ("hidden_size", "num_attention_heads"):
        value = raw[key]
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"{where}: {key} is {value!r}, expected a positive integer")
        sizes.append(value)
    return sizes[0] // sizes[1]


def check_layer_types(raw: dict[str, Any], config: ModelConfig, where: str) -> None:
    """Raise ValueError unless the attention of each layer in ``config.json`` is that of ``config``."""
    layer_types = raw.get("layer_types")
    if layer_types not in (None, config.layer_types):
        kinds = " and ".join(dict.fromkeys(config.layer_types))
        raise ValueError(
            f"{where}: layer_types must be {kinds} in turn for num_hidden_layers "
            f"({config.num_layers}) layers, got {str(layer_types)[:200]}"
        )
