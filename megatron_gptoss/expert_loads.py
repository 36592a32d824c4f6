"""Load of the experts in training: the tokens that the routers send to each expert."""

import torch
import torch.distributed as dist

from megatron_gptoss.layers.router import GptOssRouter
from megatron_gptoss.step_results import LoadRange


class ExpertLoads:
    """Counts of a model's routers since the last call of ``take``."""

    def __init__(self, model: torch.nn.Module, num_layers: int) -> None:
        """Find the routers of this rank.

        Args:
            model: model of this rank. Dense models have no routers.
            num_layers: layers in the whole model.
        """
        self._routers = [module for module in model.modules() if isinstance(module, GptOssRouter)]
        self._num_layers = num_layers

    def take(self) -> LoadRange | None:
        """Return the loads over all ranks, and reset the counts. Collective.

        None for a dense model, and if no token was routed.
        """
        if not self._routers:
            return None
        experts = self._routers[0].config.num_moe_experts
        device = next(self._routers[0].parameters()).device
        counts = torch.zeros(self._num_layers, experts, dtype=torch.double, device=device)
        for router in self._routers:
            if router.expert_tokens is not None:
                counts[router.layer_number - 1] = router.expert_tokens.double()
            router.expert_tokens = None

        # Ranks that process the same tokens count them equally, which does not change a share.
        dist.all_reduce(counts)
        shares = (counts / counts.mean(dim=1, keepdim=True)).cpu()
        if not shares.isfinite().all():
            return None
        return LoadRange(smallest=float(shares.min()), largest=float(shares.max()))
