"""Router of GPT-OSS, for every device.

Logits are fp32. The bias is an fp32 parameter, added after the matrix product.
"""

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
    router_gating_linear,
    switch_load_balancing_loss_func,
)
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
    balancing_weight: Tensor | None = None
    """Weight [] of a token's load-balancing loss in training, fp32; None for no such loss."""
    balancing_loss: Tensor | None = None
    """Load-balancing loss [] without weight, summed over the tokens so far; None before the first."""

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
            if self.balancing_weight is not None:
                probabilities = self._add_balancing_loss(probabilities, logits, is_chosen)
        return probabilities, is_chosen

    def _add_balancing_loss(
        self, probabilities: Tensor, logits: Tensor, is_chosen: Tensor
    ) -> Tensor:
        """Return the probabilities, whose backward pass adds the gradient of the balancing loss.

        The loss of a token is experts * sum_i f_i p_i (Switch Transformer, arXiv 2101.03961). f_i is
        expert i's share of the row's (token, expert) pairs and p_i the token's softmax over all experts.
        """
        # Tensor- and context-parallel ranks hold parts of one row.
        counts, _, tokens = get_tokens_per_expert_and_token_count(is_chosen, self.tp_cp_group)
        loss = switch_load_balancing_loss_func(
            logits.flatten(0, -2).softmax(dim=-1),
            counts,
            tokens,
            self.topk,
            self.num_experts,
            # Megatron's function returns the mean over the row. This coefficient makes it a sum.
            moe_aux_loss_coeff=tokens,
        )
        self.balancing_loss = loss.detach() + (
            0 if self.balancing_loss is None else self.balancing_loss
        )
        # Megatron's schedule sets the scaler to 1, because our losses are sums.
        return MoEAuxLossAutoScaler.apply(probabilities, loss * self.balancing_weight)

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
