"""Base class for the architecture configurations of all model families."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from megatron_gptoss.config.hf_config import HfKeys, load_hf_config
from megatron_gptoss.config.strict_model import StrictModel
from megatron_gptoss.rope_scaling import RopeScaling

AdapterTarget = Literal["q", "k", "v", "o", "experts", "router", "embedding", "head"]
"""Weights that can have adapters: those of every layer, the embedding, and the output layer."""
Quantization = Literal["mxfp4"]
"""Number formats for quantization-aware training of experts."""

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
    """Architecture of a model. Each family is a subclass, read by ``families.registry``.

    Predictions of memory and time, and checks of layouts, use only the properties of this class.
    """

    # Infinity and NaN are valid in Python's JSON.
    model_config = ConfigDict(allow_inf_nan=False)

    adapter_targets: ClassVar[tuple[AdapterTarget, ...]] = ()
    """Weights of this family that can have adapters."""
    quantizations: ClassVar[tuple[Quantization, ...]] = ()
    """Number formats that this family supports for training and for storing experts."""
    hf_model_types: ClassVar[tuple[str, ...]]
    """Values of ``model_type`` in config.json that this family reads."""
    hf_keys: ClassVar[HfKeys]
    """Keys of config.json that this family reads. All others are rejected."""

    model_type: str
    """Name of the family, as in model_type of Hugging Face's config.json."""
    num_layers: int = Field(gt=0)
    """Number of transformer layers."""
    num_experts: int = Field(0, ge=0)
    """Experts per layer; 0 for dense layers with one MLP."""
    experts_per_token: int = Field(0, ge=0)
    """Experts to which each token is routed."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(gt=0)
    """Inner width of an MLP or expert, after the gated linear unit."""
    num_attention_heads: int = Field(gt=0)
    """Number of query heads."""
    num_key_value_heads: int = Field(gt=0)
    """Number of key/value heads, a divisor of num_attention_heads."""
    head_size: int = Field(gt=0)
    """Channels per head. May differ from hidden_size / num_attention_heads."""
    vocab_size: int = Field(gt=0)
    """Rows of embedding and output layer."""
    sliding_window: int | None = Field(None, gt=0)
    """Keys that a token sees in window layers, including its own; null if no layer has a window."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of all RMSNorms."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary frequencies."""
    max_length: int = Field(gt=0)
    """Maximum sequence length in tokens."""
    initializer_std: float = Field(0.02, gt=0)
    """Standard deviation of random initial weights. Unused if weights are loaded."""

    @field_validator("*")
    @classmethod
    def _check_bound(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject values above UPPER_BOUNDS."""
        # The validator runs for every field, and most fields have no bound.
        bound = UPPER_BOUNDS.get(info.field_name or "")
        if bound is not None and value > bound:
            raise ValueError(f"exceeds the maximum of {bound:,}")
        return value

    @model_validator(mode="after")
    def _check_products(self) -> Self:
        """Reject products of fields that would need too much memory."""
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
        """Reject sizes of heads with which attention cannot be computed."""
        # Each key/value head serves the same number of query heads. RoPE rotates pairs of channels.
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size ({self.head_size}) must be even for rotary embeddings")
        return self

    # -- properties that a family may override -------------------------------------------------

    @property
    def default_vocabulary(self) -> Literal["gptoss", "tokenizer"]:
        """Default vocabulary: the released token ids of GPT-OSS, or the checkpoint's tokenizer."""
        return "tokenizer"

    @property
    def tied_embeddings(self) -> bool:
        """True if the output layer uses the weights of the embedding."""
        return False

    @property
    def rope_frequencies(self) -> RopeScaling | None:
        """Scaling of the rotary frequencies; None for no scaling."""
        return None

    @property
    def layer_types(self) -> list[str]:
        """Type of each layer, "sliding_attention" or "full_attention", as in config.json."""
        return ["full_attention"] * self.num_layers

    @property
    def windowed_share(self) -> float:
        """Fraction of layers with sliding-window attention, for estimates."""
        return 0.0

    @property
    def mlps_per_token(self) -> int:
        """Number of MLPs per token and layer: its experts, or 1 in dense layers."""
        return self.experts_per_token if self.num_experts else 1

    @property
    def expert_parameters(self) -> int:
        """Parameters per expert; 0 without experts."""
        return 0

    @abstractmethod
    def layer_parameters(self, tensor: int = 1) -> float:
        """Return a layer's number of parameters on one rank, without experts.

        ``tensor`` is the tensor-parallel size.
        """

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

    # -- derived properties --------------------------------------------------------------------

    @property
    def query_size(self) -> int:
        """Channels of a token's queries in all heads."""
        return self.num_attention_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Channels of a token's keys in all heads, and of its values."""
        return self.num_key_value_heads * self.head_size

    @property
    def num_parameters(self) -> int:
        """Number of all parameters with embedding and output layer. Tied weights count once."""
        layer = int(self.layer_parameters()) + self.num_experts * self.expert_parameters
        # The last term below is the norm before the output layer.
        vocabularies = 1 if self.tied_embeddings else 2
        vocabulary = vocabularies * self.vocab_size * self.hidden_size
        return self.num_layers * layer + vocabulary + self.hidden_size

    @classmethod
    def from_hf_config(cls, source: Path | str | dict[str, Any]) -> Self:
        """Read a ``config.json`` of this family.

        ``families.registry.read_hf_config`` reads files of any family.

        Args:
            source: a file, its directory, or the parsed content.

        Raises:
            ValueError: a key is missing or unsupported. The message names file and key.
        """
        raw, where = load_hf_config(source)
        model_type = raw.get("model_type")
        if model_type not in cls.hf_model_types:
            expected = " or ".join(repr(name) for name in cls.hf_model_types)
            raise ValueError(f"{where}: model_type is {model_type!r}, expected {expected}")
        return cls.from_hf_dict(raw, where)


def derived_head_size(raw: dict[str, Any], where: str) -> int:
    """Return the head size of a ``config.json`` without head_dim.

    Args:
        raw: parsed content.
        where: name of the file in errors.

    Raises:
        ValueError: a key is not a positive integer. The message names it.
    """
    # bool is a subclass of int, but true is not a size.
    sizes = []
    for key in ("hidden_size", "num_attention_heads"):
        value = raw[key]
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"{where}: {key} is {value!r}, expected a positive integer")
        sizes.append(value)
    return sizes[0] // sizes[1]


def check_layer_types(raw: dict[str, Any], config: ModelConfig, where: str) -> None:
    """Raise ValueError if the attention types in ``config.json`` differ from those of ``config``.

    Args:
        raw: parsed content.
        config: configuration of the family.
        where: name of the file in errors.
    """
    # The layers decide the order of attention types, so a file with a different order is a different model.
    layer_types = raw.get("layer_types")
    if layer_types not in (None, config.layer_types):
        kinds = " and ".join(dict.fromkeys(config.layer_types))
        raise ValueError(
            f"{where}: layer_types must repeat {kinds} for num_hidden_layers "
            f"({config.num_layers}) layers, got {str(layer_types)[:200]}. Models with a different order are "
            "not supported"
        )
