"""Routing replay: the trainer uses experts that were chosen elsewhere, with its own gate values.

    g_i = I_i exp(s_i) / sum_j I_j exp(s_j)

I is 1 for the chosen experts and constant to autograd; the gradient goes through the scores s.

Megatron-Core has a RouterReplay of its own, but one list of routers for all models of a process (a
critic's would be among them) and one switch between forward pass and recomputation for all of
them, which a pipeline that does both in turn cannot use.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_gptoss.packing import PackedBatch, RecordedRoutes
from megatron_gptoss.routes import ROUTE_DTYPES, unknown_route


class LayerReplay:
    """The routes of one router: [tokens of this rank, top_k] per micro-batch, each used once.

    A recomputed layer routes twice: first without gradients, then with gradients in the backward
    pass. Backward passes come in the order of the forward passes, so a second queue serves them.
    """

    def __init__(self, router: Any, layer: int) -> None:
        self.router = router
        self.layer = layer
        """Its number in the whole model, from 0."""

        config = router.config
        modules = config.recompute_modules or []
        self.is_recomputed = config.recompute_granularity == "selective" and "moe" in modules
        self.is_recomputing = False
        """Whether the call that goes on is the second of its micro-batch."""

        self.pending: deque[Tensor | None] = deque()
        """Routes of the micro-batches to come; None where the router chooses."""
        self.pending_recompute: deque[Tensor | None] = deque()
        """The same for their recomputation."""

        self.recorded: list[Tensor] | None = None
        """int16 [tokens, top_k] of every micro-batch since recording began."""
        self.agreeing: Tensor | float = 0.0
        """Prescribed routes that the router would have chosen itself."""
        self.compared: Tensor | float = 0.0
        """Prescribed routes."""

    def take(self) -> Tensor | None:
        """Return the routes of the micro-batch that now passes; None: the router chooses."""
        # Megatron's checkpointing runs the layer without gradients first, and with them when the
        # backward pass needs what it threw away: that tells the two calls apart. In evaluation
        # nothing is checkpointed.
        runs_twice = self.is_recomputed and self.router.training
        self.is_recomputing = runs_twice and torch.is_grad_enabled()

        queue = self.pending_recompute if self.is_recomputing else self.pending
        if not queue:
            raise RuntimeError(
                f"routing replay: the router of layer {self.layer} routes a micro-batch twice"
            )

        # The recomputation must take the same experts, or its activations would not be those whose
        # gradients come back. Where the router chose by itself it does so again, from the same
        # scores.
        routes = queue.popleft()
        if runs_twice and not self.is_recomputing:
            self.pending_recompute.append(routes)
        return routes

    def replace_routes(self, chosen: Tensor, prescribed: Tensor | None) -> Tensor:
        """Replace the router's choice where another is prescribed.

        Counts how often both are the same set, and records the result; neither a second time in
        recomputation.

        Args:
            chosen: int64 [tokens, top_k], the router's own choice.
            prescribed: the same shape; rows of -1 leave the router's choice. None: all of it.
        """
        routes = chosen
        if prescribed is not None:
            if prescribed.shape != chosen.shape:
                raise ValueError(
                    f"routing replay: layer {self.layer} routes {tuple(chosen.shape)} "
                    f"[tokens, top_k] and was given {tuple(prescribed.shape)}"
                )
            is_prescribed = prescribed[:, :1] >= 0
            routes = torch.where(is_prescribed, prescribed, chosen)
            if not self.is_recomputing:
                self._count_agreement(chosen, prescribed, is_prescribed[:, 0])

        # What was used, not what the router would have chosen.
        if self.recorded is not None and not self.is_recomputing:
            self.recorded.append(routes.to(torch.int16))
        return routes

    def _count_agreement(self, chosen: Tensor, prescribed: Tensor, is_prescribed: Tensor) -> None:
        # As sets, since experts come in the order of their scores and the order changes no output.
        # Counters stay on the GPU; reading one here would make every layer wait.
        chosen_sets = chosen.sort(dim=-1).values
        prescribed_sets = prescribed.sort(dim=-1).values
        is_same = (chosen_sets == prescribed_sets).all(dim=-1)
        self.agreeing += (is_same & is_prescribed).sum()
        self.compared += is_prescribed.sum()


class RoutingReplay:
    """Prescribes the routes of one rank's model, records what is chosen and counts agreement."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.layers: list[LayerReplay] = []
        # In the order of the layers. On a pipeline rank these are some of the model's layers, which
        # is why each knows its number in the whole model.
        for module in model.modules():
            if isinstance(module, TopKRouter):
                module.replay = LayerReplay(module, module.layer_number - 1)
                self.layers.append(module.replay)

    def prescribe(self, batch: PackedBatch) -> None:
        """Queue the routes of the next micro-batch: those that the batch has, be it from an engine
        or as this rank recorded them; without any the routers choose.

        batch: this context-parallel rank's tokens; its ``routed_experts`` are of the layers of the
            whole model.
        """
        if batch.recorded_routes is not None:
            # Padding is routed anew, as it is with an engine's routes.
            is_padding = _share_of_tokens(batch.sample_ids < 0)[:, None]
            for layer, recorded in zip(self.layers, batch.recorded_routes.layers, strict=True):
                recorded = recorded.to(is_padding.device).long()
                layer.pending.append(torch.where(is_padding, -1, recorded))
            return

        # [tokens of this context-parallel rank, layers, top_k] -> those that this tensor-parallel
        # rank routes; the padding's entries say -1.
        routes = batch.routed_experts
        if routes is not None:
            routes = expert_numbers(_share_of_tokens(routes))
        for layer in self.layers:
            layer.pending.append(None if routes is None else routes[:, layer.layer])

    def check_consumed(self) -> None:
        """Raise RuntimeError if a route that was prescribed has not been used."""
        for layer in self.layers:
            if layer.pending or layer.pending_recompute:
                raise RuntimeError(
                    f"routing replay: layer {layer.layer} left routes of "
                    f"{len(layer.pending)} micro-batches unused, "
                    f"and of {len(layer.pending_recompute)} in recomputation"
                )

    def agreement(self) -> dict[str, float]:
        """Return counts since the last call, over all ranks. Collective.

        ``routes_compared``: prescribed (token, layer) routes; ``routes_agreeing``: those that the
        router would have chosen itself.
        """
        # Reading the counters waits for the GPU, which adding to them does not.
        agreeing = float(sum(layer.agreeing for layer in self.layers))
        compared = float(sum(layer.compared for layer in self.layers))
        for layer in self.layers:
            layer.agreeing = 0.0
            layer.compared = 0.0

        counts = torch.tensor([agreeing, compared], dtype=torch.double, device=self._device)
        dist.all_reduce(counts)
        return {"routes_agreeing": float(counts[0]), "routes_compared": float(counts[1])}

    def start_recording(self) -> None:
        """Record the routes of all micro-batches from now on."""
        for layer in self.layers:
            layer.recorded = []

    def recorded(self) -> list[RecordedRoutes]:
        """Return what this rank's routers chose for every micro-batch since ``start_recording``,
        and stop."""
        # [layer][micro-batch] -> [micro-batch][layer]
        by_layer = [layer.recorded or [] for layer in self.layers]
        for layer in self.layers:
            layer.recorded = None
        return [RecordedRoutes(list(routes)) for routes in zip(*by_layer, strict=True)]

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.layers[0].router.parameters()).device
        return device


def _share_of_tokens(per_token: Tensor) -> Tensor:
    """Cut out this tensor-parallel rank's tokens: with sequence parallelism each routes a share of
    them."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return per_token.tensor_split(size)[rank]


def expert_numbers(routes: Tensor) -> Tensor:
    """Widen routes of either dtype (``megatron_gptoss.routes``) to int64, with -1 where no expert
    is known."""
    wide = routes.long()
    if routes.dtype != torch.uint8:
        return wide
    return torch.where(wide == unknown_route(ROUTE_DTYPES[0]), -1, wide)
