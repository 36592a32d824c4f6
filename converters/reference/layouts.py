"""Two layouts of a model's weights: Hugging Face's and Megatron's.

A layout computes the linear maps of a model from weights as one format stores them, one tensor at a
time. It does not use the converters' name table. If this table is wrong in both directions,
converting there and back restores every weight, but the two layouts compute different outputs.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

Tensor = torch.Tensor


def build_getter(weights: Mapping[str, Tensor]) -> Callable[..., Tensor]:
    """Return a function that reads weights from memory: the ``get`` of a ``HuggingFaceLayout``.

    Args:
        weights: tensors by Hugging Face name.
    """

    def get(name: str, expert: int | None = None) -> Tensor:
        return weights[name] if expert is None else weights[name][expert]

    return get


class WeightLayout:
    """Linear maps of a model, computed from weights of one format.

    Every method reads the weights that it needs and keeps none. Memory therefore does not grow with
    the number of layers or experts.

    Args:
        config: architecture of the model.
        get: source of stored tensors, such as ``HfDirectory.get`` or ``MegatronCheckpoint.get``.
        dtype: dtype of all computed values.
    """

    names: ClassVar[dict[str, str]]
    """Names in this layout of the tensors and linear maps that both layouts have."""

    def __init__(
        self, config: Any, get: Callable[..., Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        self.config = config
        self.get = get
        self.dtype = dtype

    def stored(self, name: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        """Read a tensor by its name in the layout, in the dtype in which it is stored.

        Names of tensors in layers have no prefix such as "model.layers.0.". The shape [...] is
        that of the layout, without the dimensions of layers and experts.
        """
        raise NotImplementedError

    def weight(self, name: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        """Read a tensor [...] by its name in the layout, in ``dtype``. See ``stored``."""
        return self.stored(name, layer, expert).to(self.dtype)

    def linear(
        self, name: str, x: Tensor, layer: int, expert: int | None = None, bias: bool = True
    ) -> Tensor:
        """Map x [tokens, in] through a weight [out, in] and, unless ``bias`` is false, its bias."""
        product = x @ self.weight(f"{name}.weight", layer, expert).T
        return product + self.weight(f"{name}.bias", layer, expert) if bias else product

    def query_key_value(self, layer: int, x: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [tokens, hidden] to query, key and value [tokens, heads, head_size]."""
        raise NotImplementedError

    def gate_up(self, layer: int, expert: int | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project x [tokens, hidden] to gate and up [tokens, intermediate] of an MLP."""
        raise NotImplementedError

    def down(self, layer: int, expert: int | None, x: Tensor) -> Tensor:
        """Project x [tokens, intermediate] to [tokens, hidden] in an MLP."""
        raise NotImplementedError


class HuggingFaceLayout(WeightLayout):
    """Layout of Hugging Face, with separate projections to query, key and value."""

    names: ClassVar[dict[str, str]] = {
        "embedding": "model.embed_tokens.weight",
        "output layer": "lm_head.weight",
        "final norm": "model.norm.weight",
        "norm before attention": "input_layernorm.weight",
        "norm before mlp": "post_attention_layernorm.weight",
        "sinks": "self_attn.sinks",
        "attention output": "self_attn.o_proj",
    }

    def stored(self, name: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        full_name = name if layer is None else f"model.layers.{layer}.{name}"
        return self.get(full_name, expert)

    def query_key_value(self, layer: int, x: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
        # The number of heads follows from the width.
        by_head = (-1, self.config.head_size)
        query = self.linear("self_attn.q_proj", x, layer, bias=bias).unflatten(-1, by_head)
        key = self.linear("self_attn.k_proj", x, layer, bias=bias).unflatten(-1, by_head)
        value = self.linear("self_attn.v_proj", x, layer, bias=bias).unflatten(-1, by_head)
        return query, key, value


class MegatronLayout(WeightLayout):
    """Layout of Megatron, with one projection to query, key and value.

    Its rows are grouped by kv head.
    """

    names: ClassVar[dict[str, str]] = {
        "embedding": "embedding.word_embeddings.weight",
        "output layer": "output_layer.weight",
        "final norm": "decoder.final_layernorm.weight",
        "norm before attention": "self_attention.linear_qkv.layer_norm_weight",
        "norm before mlp": "pre_mlp_layernorm.weight",
        "sinks": "self_attention.core_attention.softmax_offset",
        "attention output": "self_attention.linear_proj",
    }

    def stored(self, name: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        full_name = name if layer is None else f"decoder.layers.{name}"
        # Checkpoints stack layers and experts, so both are indices and not parts of the name.
        return self.get(full_name, tuple(i for i in (layer, expert) if i is not None))

    def query_key_value(self, layer: int, x: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
        # The rows of a group: its query heads, its key head, its value head.
        qkv = self.linear("self_attention.linear_qkv", x, layer, bias=bias)
        shape = (len(x), self.config.num_key_value_heads, -1, self.config.head_size)
        groups = qkv.view(shape)
        return groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]
