"""The arithmetic of dense decoders in either layout."""

from typing import ClassVar

from torch.nn.functional import silu

from converters.reference.layouts import HuggingFaceLayout, LayoutModel, MegatronLayout, Tensor


class _Dense(LayoutModel):
    """What both layouts compute alike."""

    def sinks(self, layer: int) -> None:
        return None

    def attention_output(self, layer: int, x: Tensor) -> Tensor:
        return self.linear(self.names["attention output"], x, layer, bias=False)


class HuggingFaceDense(_Dense, HuggingFaceLayout):
    """Separate gate and up projection."""

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.separate_qkv(layer, x, bias=self.config.has_qkv_bias)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        gate = self.linear("mlp.gate_proj", x, layer, bias=False)
        up = self.linear("mlp.up_proj", x, layer, bias=False)
        return self.linear("mlp.down_proj", silu(gate) * up, layer, bias=False)


class MegatronDense(_Dense, MegatronLayout):
    """All gates above all ups; the norm before the MLP belongs to its first matrix."""

    names: ClassVar[dict[str, str]] = {
        **MegatronLayout.names,
        "norm before mlp": "mlp.linear_fc1.layer_norm_weight",
    }

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.grouped_qkv(layer, x, bias=self.config.has_qkv_bias)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        gate_up = self.linear("mlp.linear_fc1", x, layer, bias=False)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.linear("mlp.linear_fc2", silu(gate) * up, layer, bias=False)
