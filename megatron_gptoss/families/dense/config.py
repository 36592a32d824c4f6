"""The architecture of dense decoders of the Llama and Qwen2.5 kind.

Both have grouped-query attention to the whole prefix, RMSNorm, SwiGLU and rotary embeddings. Qwen2
adds biases to the projections to queries, keys and values.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError

from megatron_gptoss.config import ModelConfig, rope_settings
from megatron_gptoss.rope_scaling import RopeScaling

DenseRopeScaling = Annotated[RopeScaling, Field(discriminator="rope_type")]

_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "max_length": "max_position_embeddings",
}
"""Keys of config.json that have to be there, by field."""

_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Keys of config.json whose other values are other models, and what they must say if present.
attention_bias of Llama adds one to the output projection, too."""

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


class DenseModelConfig(ModelConfig):
    """A decoder without experts: Llama (also SmolLM2 and others of its shape) or Qwen2 and Qwen2.5."""

    hf_model_types: ClassVar[tuple[str, ...]] = ("llama", "qwen2")

    model_type: Literal["llama", "qwen2"]
    """qwen2 has biases of queries, keys and values, llama has none."""
    num_experts: Literal[0] = 0
    """There are none."""
    experts_per_token: Literal[0] = 0
    """There are none."""
    sliding_window: None = None
    """Every layer attends to the whole prefix."""
    rms_norm_eps: float = Field(1e-6, gt=0)
    """Epsilon of all RMSNorms."""
    rope_scaling: DenseRopeScaling | None = None
    """How the rotary frequencies are stretched beyond the context of pretraining; null: not."""
    tie_word_embeddings: bool = False
    """Whether the output layer is the embedding."""

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have biases."""
        return self.model_type == "qwen2"

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.tie_word_embeddings

    @property
    def rope_frequencies(self) -> RopeScaling | None:
        """As the field says."""
        return self.rope_scaling

    def layer_parameters(self, tensor: int = 1) -> float:
        """Count the parameters of a layer on one of ``tensor`` tensor-parallel ranks."""
        hidden = self.hidden_size
        inputs = hidden + 1 if self.has_qkv_bias else hidden

        projections = inputs * (self.query_size + 2 * self.key_size) / tensor
        output_projection = self.query_size * hidden / tensor
        mlp = 3 * hidden * self.intermediate_size / tensor
        norms = 2 * hidden
        return projections + output_projection + mlp + norms

    def to_hf_config(self, **extra: Any) -> dict[str, Any]:
        """Return the content of ``config.json``; ``extra`` adds keys such as eos_token_id."""
        fields = {key: getattr(self, name) for name, key in _HF_NAMES.items()}
        rope_scaling = None if self.rope_scaling is None else self.rope_scaling.model_dump()

        if self.model_type == "llama":
            own = {"attention_bias": False, "mlp_bias": False}
        else:
            own = {"use_sliding_window": False}
        return {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            **fields,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_size,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_scaling,
            "initializer_range": self.initializer_std,
            "tie_word_embeddings": self.tie_word_embeddings,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "use_cache": True,
            **own,
            **extra,
        }

    @classmethod
    def from_hf_dict(cls, raw: dict[str, Any], where: str) -> Self:
        """Read a parsed ``config.json``; ``where`` names it in errors.

        Raises:
            ValueError: naming the key that is missing or unsupported.
        """
        fields: dict[str, Any] = {"model_type": raw["model_type"]}
        for name, key in _HF_NAMES.items():
            if key not in raw:
                raise ValueError(f"{where}: key '{key}' is missing")
            fields[name] = raw[key]
        _check_supported(raw, where)

        heads = raw["num_attention_heads"]
        fields["num_key_value_heads"] = raw.get("num_key_value_heads") or heads
        fields["head_size"] = raw.get("head_dim") or raw["hidden_size"] // heads
        fields["tie_word_embeddings"] = raw.get("tie_word_embeddings", False)
        if "initializer_range" in raw:
            fields["initializer_std"] = raw["initializer_range"]

        rope = rope_settings(raw)
        if "rope_theta" in rope:
            fields["rope_theta"] = rope.pop("rope_theta")
        fields["rope_scaling"] = _read_rope_scaling(rope, where)
        return cls(**fields)


def _check_supported(raw: dict[str, Any], where: str) -> None:
    """Refuse what our layers do not compute: it would load and be wrong."""
    for key, value in _FIXED.items():
        if raw.get(key, value) != value:
            raise ValueError(f"{where}: {key} must be {value!r}, got {raw[key]!r}")

    # Qwen2.5 names a window in every config.json, and uses it in none.
    if raw.get("use_sliding_window"):
        raise ValueError(
            f"{where}: use_sliding_window is true; layers with a window are not built for "
            f"{raw['model_type']}"
        )
    layer_types = set(raw.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ValueError(f"{where}: layer_types must all be full_attention, got {layer_types}")


def _read_rope_scaling(rope: dict[str, Any], where: str) -> RopeScaling | None:
    """Read rope_scaling without its rope_theta. Raises ValueError naming the key."""
    settings = dict(rope)
    # Older files have type for rope_type.
    rope_type = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    if rope_type == "default":
        return None

    known = ("linear", "yarn", "llama3")
    if rope_type not in known:
        raise ValueError(
            f"{where}: rope_scaling.rope_type {rope_type!r} is not built; known: {', '.join(known)}"
        )
    if rope_type == "linear":
        settings = {"factor": settings.get("factor")}
    try:
        adapter: TypeAdapter[RopeScaling] = TypeAdapter(DenseRopeScaling)
        return adapter.validate_python({"rope_type": rope_type, **settings})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][1:])
        raise ValueError(f"{where}: rope_scaling.{key}: {first['msg']}") from None
