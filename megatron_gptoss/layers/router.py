"""The router of GPT-OSS on every device.

Logits are fp32; the bias is held in fp32 and added outside the matrix product.
"""

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_gptoss.routing_replay import LayerReplay


class GptOssRouter(TopKRouter):
    """Megatron's router without two faults of megatron-core 0.19.2.

    - With ``moe_router_dtype="fp32"`` and a bf16 bias, Transformer Engine's product returns wrong
      logits, as far off as without any bias.
    - ``TopKRouter.gating`` moves weights that are on a CPU to a GPU.
    """

    replay: LayerReplay | None = None
    """Set by RoutingReplay: prescribes or records the experts."""

    def reset_parameters(self) -> None:
        """Initialise the weights, then undo Megatron's cast of the bias to the model's dtype."""
        super().reset_parameters()
        bias_dtype = torch.promote_types(self.config.params_dtype, torch.float32)
        self.bias.data = self.bias.data.to(bias_dtype)

    def gating(self, input: Tensor) -> Tensor:
        """Compute the logits of all experts in ``moe_router_dtype``."""
        dtypes = {"fp32": torch.float32, "fp64": torch.float64}
        dtype = dtypes[self.config.moe_router_dtype]
        logits = router_gating_linear(input, self.gating_weight(), None, dtype)
        return logits + self.bias.to(dtype)

    def gating_weight(self) -> Tensor:
        """Return the weight [experts, hidden_size] that tokens are multiplied with."""
        weight: Tensor = self.weight
        return weight

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose the top-k experts of every token, or take the prescribed ones.

        Returns:
            Probabilities and bool mask, both [tokens, experts]; zero and False where not chosen.
        """
        if self.config.router_noise:
            logits = logits + self.config.router_noise * torch.randn_like(logits)

        # Megatron always takes this softmax in fp32, which would cap an fp64 comparison at 1e-7.
        if self.replay is None and logits.dtype != torch.float64:
            return super().routing(logits, padding_mask)

        # Megatron routes [tokens, experts]; with a sequence and a batch dimension the logits come
        # as [tokens, 1, experts].
        logits = logits.flatten(0, -2)
        experts = logits.topk(self.topk, dim=-1).indices
        if self.replay is not None:
            experts = self.replay.replace_routes(experts, self.replay.take())

        # The gate values are the trainer's own: gradients reach the scores of the chosen experts. The
        # softmax is over these alone, [tokens, top_k], as GPT-OSS defines it; over all experts first
        # would give other values than the engine's.
        gates = logits.gather(1, experts).softmax(dim=-1)
        probabilities = torch.zeros_like(logits).scatter(1, experts, gates)
        is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        return probabilities, is_chosen
