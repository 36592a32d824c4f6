"""Architecture of dense decoders: Llama and Qwen2.5.

Both have grouped-query attention without windows, RMSNorm, SwiGLU and rotary embeddings. Qwen2 has
biases in the projections to queries, keys and values.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter

from megatron_gptoss.config import (
    HfKeys,
    ModelConfig,
    check_layer_types,
    derived_head_size,
    read_rope,
)
from megatron_gptoss.rope_scaling import RopeScaling

DenseRopeScaling = Annotated[RopeScaling, Field(discriminator="rope_type")]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


class DenseModelConfig(ModelConfig):
    """Decoder without experts: Llama (also SmolLM2 and other Llama-like models), Qwen2, Qwen2.5."""

    hf_model_types: ClassVar[tuple[str, ...]] = ("llama", "qwen2")
    hf_keys: ClassVar[HfKeys] = HfKeys(
        fields={
            "num_hidden_layers": "num_layers",
            "hidden_size": "hidden_size",
            "intermediate_size": "intermediate_size",
            "num_attention_heads": "num_attention_heads",
            "num_key_value_heads": "num_key_value_heads",
            "head_dim": "head_size",
            "vocab_size": "vocab_size",
            "rms_norm_eps": "rms_norm_eps",
            "max_position_embeddings": "max_length",
            "initializer_range": "initializer_std",
            "tie_word_embeddings": "tie_word_embeddings",
        },
        optional=frozenset({
            "num_key_value_heads", "head_dim", "initializer_range", "tie_word_embeddings",
        }),
        nullable=frozenset({"num_key_value_heads", "head_dim"}),
        fixed={
            # With attention_bias Llama has a bias in the output projection, too, which is not
            # supported.
            "attention_bias": (False,),
            "hidden_act": ("silu", "swish"),
            "is_llama_config": (True,),
            "mlp_bias": (False,),
            "quantization_config": (),
            "rope_interleaved": (False,),
            "use_mrope": (False,),
            # Every config.json of Qwen2.5 has a window, but this key disables it.
            "use_sliding_window": (False,),
        },
        checked=frozenset({"architectures", "layer_types", "sliding_window"}),
        copied=frozenset({"max_window_layers", "pretraining_tp"}),
    )  # fmt: skip

    model_type: Literal["llama", "qwen2"]
    """Family. qwen2 has biases for queries, keys and values; llama has no biases."""
    num_experts: Literal[0] = 0
    """Always 0: the family has no experts."""
    experts_per_token: Literal[0] = 0
    """Always 0: the family has no experts."""
    sliding_window: None = None
    """Always null: every layer attends to all earlier tokens."""
    rms_norm_eps: float = Field(1e-6, gt=0)
    """Epsilon of all RMSNorms."""
    rope_scaling: DenseRopeScaling | None = None
    """Scaling of the rotary frequencies for contexts beyond pretraining; null for no scaling."""
    tie_word_embeddings: bool = False
    """Use the weights of the embedding for the output layer, too."""

    @property
    def has_qkv_bias(self) -> bool:
        """True if the projections to queries, keys and values have biases."""
        return self.model_type == "qwen2"

    @property
    def tied_embeddings(self) -> bool:
        """True if the output layer uses the weights of the embedding."""
        return self.tie_word_embeddings

    @property
    def rope_frequencies(self) -> RopeScaling | None:
        """Scaling of the rotary frequencies; None for no scaling."""
        return self.rope_scaling

    def layer_parameters(self, tensor: int = 1) -> float:
        """Return a layer's number of parameters on one of ``tensor`` tensor-parallel ranks."""
        hidden = self.hidden_size
        inputs = hidden + 1 if self.has_qkv_bias else hidden

        projections = inputs * (self.query_size + 2 * self.key_size) / tensor
        output_projection = self.query_size * hidden / tensor
        # The gate, up and down projections.
        mlp = 3 * hidden * self.intermediate_size / tensor
        norms = 2 * hidden
        return projections + output_projection + mlp + norms

    def to_hf_config(self, **extra: Any) -> dict[str, Any]:
        """Return the content of ``config.json``, with ``extra`` keys such as eos_token_id."""
        rope_scaling = None if self.rope_scaling is None else self.rope_scaling.model_dump()

        # Each family writes the keys that its files usually have.
        if self.model_type == "llama":
            family_fields = {"attention_bias": False, "mlp_bias": False}
        else:
            family_fields = {"use_sliding_window": False}
        return {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_length,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_size,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_scaling,
            "initializer_range": self.initializer_std,
            "tie_word_embeddings": self.tie_word_embeddings,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "use_cache": True,
            **family_fields,
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
        model_type = raw["model_type"]
        fields = {"model_type": model_type, **cls.hf_keys.read(raw, where)}
        _check_of_type(raw, where)

        # The defaults of transformers for keys that are null or missing.
        fields.setdefault("num_key_value_heads", raw["num_attention_heads"])
        if "head_size" not in fields:
            fields["head_size"] = derived_head_size(raw, where)

        rope = read_rope(raw, where)
        if rope.theta is not None:
            fields["rope_theta"] = rope.theta
        adapter: TypeAdapter[RopeScaling] = TypeAdapter(DenseRopeScaling)
        fields["rope_scaling"] = rope.build(adapter, where)
        config = cls.hf_keys.build(cls, fields, where)
        check_layer_types(raw, config, where)
        return config


def _check_of_type(raw: dict[str, Any], where: str) -> None:
    """Raise ValueError if a key is not supported for this model_type. The message names it."""
    model_type = raw["model_type"]
    architectures = raw.get("architectures")
    if architectures not in (None, [_ARCHITECTURES[model_type]]):
        raise ValueError(
            f"{where}: architectures must be {[_ARCHITECTURES[model_type]]}, got "
            f"{architectures!r}. "
            "Other architectures are not supported"
        )
    # The default of transformers for Qwen2 is 32, whatever the number of query heads.
    if model_type == "qwen2" and "num_key_value_heads" not in raw:
        raise ValueError(f"{where}: key 'num_key_value_heads' is missing")
    if model_type == "llama" and raw.get("sliding_window") is not None:
        raise ValueError(
            f"{where}: sliding_window must be null, got {raw['sliding_window']!r}. Layers with a "
            "window are not supported for llama"
        )
