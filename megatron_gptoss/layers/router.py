"""The router of GPT-OSS on every device: fp32 logits, the bias held in fp32 and added outside the matrix product."""

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter

from megatron_gptoss.routing_replay import LayerReplay


class GptOssRouter(TopKRouter):
    """Steps around two faults of megatron-core 0.19.2 and around its insistence on CUDA.

    With ``moe_router_dtype="fp32"`` and a bf16 bias, Transformer Engine's product returns wrong logits, as far off as
    without any bias. ``TopKRouter.gating`` moves CPU weights to a GPU."""

    replay: LayerReplay | None = None

    def reset_parameters(self) -> None:
        super().reset_parameters()  # which casts the bias to the model's dtype
        self.bias.data = self.bias.data.to(torch.promote_types(self.config.params_dtype, torch.float32))

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        dtype = {"fp32": torch.float32, "fp64": torch.float64}[self.config.moe_router_dtype]
        return router_gating_linear(input, self.weight, None, dtype) + self.bias.to(dtype)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if noise := self.config.router_noise:
            logits = logits + noise * torch.randn_like(logits)
        given = self.replay.take() if self.replay is not None else None
        if logits.dtype != torch.float64 and given is None and self.replay is None:
            return super().routing(logits, padding_mask)
        # Megatron takes this softmax in fp32 always, which would cap an fp64 comparison at 1e-7
        logits = logits.flatten(0, -2)
        experts = logits.topk(self.topk, dim=-1).indices
        if self.replay is not None:
            experts = self.replay.replaced(experts, given)
        probs = torch.zeros_like(logits).scatter(1, experts, logits.gather(1, experts).softmax(dim=-1))
        return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
