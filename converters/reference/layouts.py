"""A model's weights with the arithmetic of one side's layout, in fp32, for ``forward``.

It is written from the layout itself and not from the name table: a table that is wrong in both
directions the same way moves every weight there and back unharmed, but not through this.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn.functional import linear

Tensor = torch.Tensor


class LayoutModel:
    """Weights of one model with the arithmetic of its layout; x and results are fp32."""

    names: ClassVar[dict[str, str]]
    """What the layout calls the tensors and linear maps that both layouts hold alike."""

    def __init__(self, config: Any, get: Callable[..., Tensor]) -> None:
        """``config`` of the family; ``get`` of HfDirectory or of MegatronCheckpoint."""
        self.config = config
        self.get = get

    def tensor(self, name: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        """Read a tensor by the layout's name; in a layer, without the layers' common prefix."""
        raise NotImplementedError

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [tokens, hidden] to three [tokens, heads or groups, head_size]."""
        raise NotImplementedError

    def sinks(self, layer: int) -> Tensor | None:
        """Return the sink logits [heads] of a layer; None in a model without."""
        raise NotImplementedError

    def attention_output(self, layer: int, x: Tensor) -> Tensor:
        """Project the heads' outputs x [tokens, query_size] to [tokens, hidden]."""
        raise NotImplementedError

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """Compute what follows the second norm of a layer, [tokens, hidden] of [tokens, hidden]."""
        raise NotImplementedError

    def linear(
        self, name: str, x: Tensor, layer: int, expert: int | None = None, bias: bool = True
    ) -> Tensor:
        """Map x [tokens, in] through a weight [out, in] and, unless ``bias`` is false, its bias."""
        weight = self.tensor(f"{name}.weight", layer, expert).float()
        if not bias:
            return linear(x, weight)
        return linear(x, weight, self.tensor(f"{name}.bias", layer, expert).float())


class HuggingFaceLayout(LayoutModel):
    """Separate q, k and v."""

    names: ClassVar[dict[str, str]] = {
        "embedding": "model.embed_tokens.weight",
        "output layer": "lm_head.weight",
        "final norm": "model.norm.weight",
        "norm before attention": "input_layernorm.weight",
        "norm before mlp": "post_attention_layernorm.weight",
        "sinks": "self_attn.sinks",
        "attention output": "self_attn.o_proj",
    }

    def tensor(self, name: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        if layer is None:
            return self.get(name, expert)
        return self.get(f"model.layers.{layer}.{name}", expert)

    def separate_qkv(self, layer: int, x: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Compute ``query_key_value``, with or without biases."""
        by_head = (-1, self.config.head_size)
        query = self.linear("self_attn.q_proj", x, layer, bias=bias).unflatten(-1, by_head)
        key = self.linear("self_attn.k_proj", x, layer, bias=bias).unflatten(-1, by_head)
        value = self.linear("self_attn.v_proj", x, layer, bias=bias).unflatten(-1, by_head)
        return query, key, value


class MegatronLayout(LayoutModel):
    """One QKV by groups."""

    names: ClassVar[dict[str, str]] = {
        "embedding": "embedding.word_embeddings.weight",
        "output layer": "output_layer.weight",
        "final norm": "decoder.final_layernorm.weight",
        "norm before attention": "self_attention.linear_qkv.layer_norm_weight",
        "norm before mlp": "pre_mlp_layernorm.weight",
        "sinks": "self_attention.core_attention.softmax_offset",
        "attention output": "self_attention.linear_proj",
    }

    def tensor(self, name: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        index = tuple(i for i in (layer, expert) if i is not None)
        if layer is None:
            return self.get(name, index)
        return self.get(f"decoder.layers.{name}", index)

    def grouped_qkv(self, layer: int, x: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Compute ``query_key_value``, with or without biases."""
        # a group is its query heads, its key head, its value head
        qkv = self.linear("self_attention.linear_qkv", x, layer, bias=bias)
        shape = (len(x), self.config.num_key_value_heads, -1, self.config.head_size)
        groups = qkv.view(shape)
        return groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]
