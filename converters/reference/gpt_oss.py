"""The arithmetic of GPT-OSS in either layout: sinks, biases, routed experts."""

import torch

from converters.reference.layouts import HuggingFaceLayout, LayoutModel, MegatronLayout, Tensor


class _GptOss(LayoutModel):
    """What both layouts compute alike."""

    def sinks(self, layer: int) -> Tensor:
        return self.tensor(self.names["sinks"], layer).float()

    def attention_output(self, layer: int, x: Tensor) -> Tensor:
        return self.linear(self.names["attention output"], x, layer)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        # The softmax runs over the chosen experts only.
        router_logits = self.linear("mlp.router", x, layer)
        top_logits, chosen = router_logits.topk(self.config.experts_per_token)
        weights = top_logits.softmax(-1)

        result = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            output = self.apply_expert(layer, expert, x[rows])
            result[rows] += weights[rows, slots, None] * output
        return result

    def apply_expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        """Compute one expert's output [tokens, hidden] of x [tokens, hidden]."""
        raise NotImplementedError


class HuggingFaceGptOss(_GptOss, HuggingFaceLayout):
    """Experts x @ [in, out] with alternating gate and up channels."""

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.separate_qkv(layer, x, bias=True)

    def apply_expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        gate_up = self._project("gate_up_proj", layer, expert, x)
        gate = gate_up[:, 0::2]
        up = gate_up[:, 1::2]
        return self._project("down_proj", layer, expert, swiglu(gate, up, self.config.swiglu_limit))

    def _project(self, name: str, layer: int, expert: int, x: Tensor) -> Tensor:
        weight = self.tensor(f"mlp.experts.{name}", layer, expert)
        bias = self.tensor(f"mlp.experts.{name}_bias", layer, expert)
        return x @ weight.float() + bias.float()


class MegatronGptOss(_GptOss, MegatronLayout):
    """Experts [out, in] @ x, all gates before all ups."""

    def query_key_value(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.grouped_qkv(layer, x, bias=True)

    def apply_expert(self, layer: int, expert: int, x: Tensor) -> Tensor:
        experts = "mlp.experts.experts"
        gate_up = self.linear(f"{experts}.linear_fc1", x, layer, expert)
        gate, up = gate_up.chunk(2, dim=-1)
        activated = swiglu(gate, up, self.config.swiglu_limit)
        return self.linear(f"{experts}.linear_fc2", activated, layer, expert)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Apply the clamped activation of GPT-OSS (openai/gpt-oss, gpt_oss/torch/model.py)."""
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)
