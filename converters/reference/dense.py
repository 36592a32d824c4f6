"""Dense decoders of the Llama and Qwen2.5 kind."""

from typing import ClassVar

import torch
from torch.nn.functional import silu

from converters.reference.decoder import Decoder
from converters.reference.layouts import HuggingFaceLayout, MegatronLayout
from megatron_gptoss.families.dense.config import DenseModelConfig

Tensor = torch.Tensor


class DenseEquations(Decoder):
    """The equations of dense decoders."""

    config: DenseModelConfig

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layout.query_key_value(layer, x, bias=self.config.has_qkv_bias)

    def attention_output(self, layer: int, x: Tensor) -> Tensor:
        return self.layout.linear(self.layout.names["attention output"], x, layer, bias=False)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        gate, up = self.layout.gate_up(layer, None, x)
        return self.layout.down(layer, None, silu(gate) * up)


class HuggingFaceDense(HuggingFaceLayout):
    """Separate projections to gate and up."""

    def gate_up(self, layer: int, expert: int | None, x: Tensor) -> tuple[Tensor, Tensor]:
        gate = self.linear("mlp.gate_proj", x, layer, bias=False)
        return gate, self.linear("mlp.up_proj", x, layer, bias=False)

    def down(self, layer: int, expert: int | None, x: Tensor) -> Tensor:
        return self.linear("mlp.down_proj", x, layer, bias=False)


class MegatronDense(MegatronLayout):
    """All gate channels before all up channels. Its first layer includes the norm."""

    # Transformer Engine's fused norm, under whose name checkpoints store it.
    names: ClassVar[dict[str, str]] = {
        **MegatronLayout.names,
        "norm before mlp": "mlp.linear_fc1.layer_norm_weight",
    }

    def gate_up(self, layer: int, expert: int | None, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.linear("mlp.linear_fc1", x, layer, bias=False).chunk(2, dim=-1)
        return gate, up

    def down(self, layer: int, expert: int | None, x: Tensor) -> Tensor:
        return self.linear("mlp.linear_fc2", x, layer, bias=False)
