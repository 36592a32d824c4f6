"""Load of the experts in training: the tokens that the routers send to each expert.

``ExpertLoads`` measures it, and can add a loss that balances it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_gptoss.layers.router import GptOssRouter
from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.step_results import LoadRange


class ExpertLoads:
    """Counts and losses of a model's routers in a step."""

    def __init__(self, model: torch.nn.Module, num_layers: int) -> None:
        """Find the routers of this rank.

        Args:
            model: model of this rank. Dense models have no routers.
            num_layers: layers in the whole model.
        """
        self._routers = [module for module in model.modules() if isinstance(module, GptOssRouter)]
        self._num_layers = num_layers
        self._step_tokens: torch.Tensor | None = None
        """Tokens of the step on all ranks, []. None without a load-balancing loss."""

    def balance(self, batches: Sequence[PackedBatch], coefficient: float) -> None:
        """Set the load-balancing loss of the next step. Collective if the coefficient is above 0.

        Args:
            batches: micro-batches of this data-parallel rank.
            coefficient: weight of the mean over all tokens, for every layer. 0 for no such loss.

        Raises:
            ValueError: the model has no experts, or the routes of a micro-batch are prescribed.
        """
        self._step_tokens = None
        for router in self._routers:
            router.balancing_weight = None
            router.balancing_loss = None
        if coefficient == 0:
            return
        if not self._routers:
            raise ValueError(
                f"load_balancing ({coefficient:g}): the model has no experts. Set it to 0"
            )
        # The loss would move the router away from the prescribed experts instead of balancing them.
        if any(batch.has_routes for batch in batches):
            raise ValueError(
                f"load_balancing ({coefficient:g}): the routes of a micro-batch are prescribed, so "
                "the loss cannot change the loads. Set it to 0, or train without routing replay"
            )

        # Ranks of one data-parallel rank have the same micro-batches.
        tokens = torch.tensor(float(sum(batch.tokens for batch in batches)), device=self._device)
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        self._step_tokens = tokens
        for router in self._routers:
            router.balancing_weight = coefficient / tokens

    def balancing_loss(self) -> float | None:
        """Return the step's load-balancing loss without its coefficient. Collective.

        It is the mean over tokens and layers. None without such a loss.
        """
        if self._step_tokens is None:
            return None
        losses = [
            router.balancing_loss for router in self._routers if router.balancing_loss is not None
        ]
        total = torch.zeros((), dtype=torch.double, device=self._device)
        for loss in losses:
            total += loss
        dist.all_reduce(total)
        return float(total / self._step_tokens) / self._num_layers

    def take(self) -> LoadRange | None:
        """Return the loads since the last call over all ranks. Collective.

        None for a dense model, and if no token was routed.
        """
        if not self._routers:
            return None
        experts = self._routers[0].config.num_moe_experts
        counts = torch.zeros(self._num_layers, experts, dtype=torch.double, device=self._device)
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

    @property
    def _device(self) -> torch.device:
        """Device of the routers."""
        device: torch.device = next(self._routers[0].parameters()).device
        return device
