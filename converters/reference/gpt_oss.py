"""GPT-OSS (openai/gpt-oss, gpt_oss/torch/model.py): attention sinks, biases, routed experts."""

import torch

from converters.reference.decoder import Decoder
from converters.reference.layouts import HuggingFaceLayout, MegatronLayout
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig

Tensor = torch.Tensor

SWISH_SLOPE = 1.702


class GptOss(Decoder):
    """The equations of GPT-OSS."""

    config: GptOssModelConfig

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layout.query_key_value(layer, x, bias=True)

    def weighted_values(self, layer: int, scores: Tensor, value: Tensor) -> Tensor:
        # A sink takes part in the softmax like the score of one more key, which has no value.
        sinks = self.layout.weight(self.layout.names["sinks"], layer)
        column = sinks[:, None, None].expand(-1, scores.shape[1], 1)
        probabilities = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        return torch.einsum("hqk,khd->qhd", probabilities, value)

    def attention_output(self, layer: int, x: Tensor) -> Tensor:
        return self.layout.linear(self.layout.names["attention output"], x, layer)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        logits = self.layout.linear("mlp.router", x, layer)
        chosen = self.choose_experts(layer, logits)
        weights = self.expert_weights(logits, chosen)

        outputs = []
        # Visit each chosen expert once, so that its weights are read once.
        for expert in chosen.unique().tolist():
            tokens, slots = (chosen == expert).nonzero(as_tuple=True)
            output = self.expert(layer, expert, x[tokens]) * weights[tokens, slots, None]
            # One summand per expert, so that the order of a token's experts cannot affect its sum.
            outputs.append(torch.zeros_like(x).index_add(0, tokens, output))
        return torch.stack(outputs).sum(0)

    def choose_experts(self, layer: int, logits: Tensor) -> Tensor:
        """Return the experts with the largest logits, int64 [tokens, experts_per_token].

        ``logits`` are [tokens, experts].
        """
        return logits.topk(self.config.experts_per_token).indices

    def expert_weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Return the weight of each chosen expert's output, [tokens, experts_per_token]."""
        # The softmax runs over the chosen experts only.
        return logits.gather(-1, chosen).softmax(-1)

    def expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        """Compute one expert's output [tokens, hidden] of x [tokens, hidden]."""
        gate, up = self.layout.gate_up(layer, expert, x)
        activated = swiglu(gate, up, self.config.swiglu_limit)
        return self.layout.down(layer, expert, activated)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Apply the clamped activation of GPT-OSS to gate and up [tokens, intermediate]."""
    # The gate is clamped from above only, as in OpenAI's model.py.
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    # Only GPT-OSS adds 1 to up. Other SwiGLUs do not.
    return gate * torch.sigmoid(SWISH_SLOPE * gate) * (up + 1)


class HuggingFaceGptOss(HuggingFaceLayout):
    """Matrices of experts are [in, out]. Gate and up channels alternate."""

    def gate_up(self, layer: int, expert: int | None, x: Tensor) -> tuple[Tensor, Tensor]:
        gate_up = self._project("gate_up_proj", layer, expert, x)
        return gate_up[:, 0::2], gate_up[:, 1::2]

    def down(self, layer: int, expert: int | None, x: Tensor) -> Tensor:
        return self._project("down_proj", layer, expert, x)

    def _project(self, name: str, layer: int, expert: int | None, x: Tensor) -> Tensor:
        weight = self.weight(f"mlp.experts.{name}", layer, expert)
        return x @ weight + self.weight(f"mlp.experts.{name}_bias", layer, expert)


class MegatronGptOss(MegatronLayout):
    """Matrices of experts are [out, in], with all gate channels before all up channels."""

    def gate_up(self, layer: int, expert: int | None, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.linear("mlp.experts.experts.linear_fc1", x, layer, expert).chunk(2, dim=-1)
        return gate, up

    def down(self, layer: int, expert: int | None, x: Tensor) -> Tensor:
        return self.linear("mlp.experts.experts.linear_fc2", x, layer, expert)
