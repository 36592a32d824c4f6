"""Router of GPT-OSS, for every device.

Logits are fp32. The bias is an fp32 parameter, added after the matrix product.
"""

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_gptoss.routing_replay import LayerReplay


class GptOssRouter(TopKRouter):
    """Megatron's router, with two faults of megatron-core 0.19.2 corrected.

    - With ``moe_router_dtype="fp32"`` and a bf16 bias, Transformer Engine's product returns wrong
      logits. The error is as large as without a bias.
    - ``TopKRouter.gating`` moves CPU weights to a GPU.
    """

    replay: LayerReplay | None = None
    """Prescribes or records the selected experts. Set by RoutingReplay; None to do neither."""
    expert_tokens: Tensor | None = None
    """Tokens by expert in training, int64 [experts], padding included; None before the first."""

    def reset_parameters(self) -> None:
        """Initialize the weights, and convert the bias back to fp32."""
        super().reset_parameters()
        bias_dtype = torch.promote_types(self.config.params_dtype, torch.float32)
        self.bias.data = self.bias.data.to(bias_dtype)

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits [..., experts] of input [..., hidden_size] in ``moe_router_dtype``."""
        dtypes = {"fp32": torch.float32, "fp64": torch.float64}
        dtype = dtypes[self.config.moe_router_dtype]
        logits = router_gating_linear(input, self.gating_weight(), None, dtype)
        return logits + self.bias.to(dtype)

    def gating_weight(self) -> Tensor:
        """Return the weight [experts, hidden_size] of the product, in the parameter's dtype."""
        weight: Tensor = self.weight
        return weight

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Select the experts of each token: the top k, or prescribed ones.

        Args:
            logits: [tokens, experts] or [tokens, 1, experts].
            padding_mask: mask of padding for Megatron's router; unused with replay.

        Returns:
            Probabilities [tokens, experts], 0 for experts that are not selected, and a bool mask
            [tokens, experts] of the selected experts.
        """
        probabilities, is_chosen = self._select(logits, padding_mask)
        # A recomputed layer routes twice, the first time without gradients.
        if self.training and torch.is_grad_enabled():
            counts = is_chosen.sum(dim=0)
            self.expert_tokens = counts + (0 if self.expert_tokens is None else self.expert_tokens)
        return probabilities, is_chosen

    def _select(self, logits: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        # Noise is an option for tests and ablations.
        if self.config.router_noise:
            logits = logits + self.config.router_noise * torch.randn_like(logits)

        # Megatron computes this softmax in fp32, which would limit fp64 comparisons to 1e-7.
        if self.replay is None and logits.dtype != torch.float64:
            return super().routing(logits, padding_mask)

        # Logits with a batch dimension are [tokens, 1, experts].
        logits = logits.flatten(0, -2)
        experts = logits.topk(self.topk, dim=-1).indices
        if self.replay is not None:
            experts = self.replay.replace_routes(experts, self.replay.take())

        # Only the selection is prescribed. Gate values come from the trainer's logits, so gradients
        # reach the scores of the selected experts. GPT-OSS defines the softmax over the selected
        # experts [tokens, top_k]. A softmax over all experts would differ from the engine.
        gates = logits.gather(1, experts).softmax(dim=-1)
        probabilities = torch.zeros_like(logits).scatter(1, experts, gates)
        is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        return probabilities, is_chosen
