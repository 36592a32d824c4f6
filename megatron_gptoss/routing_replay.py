"""Routing replay: the trainer uses prescribed experts with its own gate values.

    g_i = I_i exp(s_i) / sum_j I_j exp(s_j)

I is 1 for the prescribed experts and constant for autograd. The gradient reaches the scores s.

Megatron-Core's RouterReplay is not used for two reasons. It has one list of routers for all models
of a process, which would include those of a critic. And it has one switch between forward pass and
recomputation for all routers, but a pipeline alternates between both.
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
    """Queue of one router's routes: [tokens of this rank, top_k] per micro-batch, used once.

    A recomputed layer routes twice: without gradients in the forward pass and with gradients in the
    backward pass. Backward passes have the order of the forward passes, so a second queue suffices.
    """

    def __init__(self, router: Any, layer: int) -> None:
        """Create empty queues.

        Args:
            router: router of the layer.
            layer: number of the layer in the whole model, from 0.
        """
        self.router = router
        """Router of the layer."""
        self.layer = layer
        """Number of the layer in the whole model, from 0."""

        config = router.config
        modules = config.recompute_modules or []
        self.is_recomputed = config.recompute_granularity == "selective" and "moe" in modules
        """True if layers are recomputed in training."""
        self.is_recomputing = False
        """True while the router is called for the second time with a micro-batch."""

        self.pending: deque[Tensor | None] = deque()
        """Routes of the next micro-batches; None if the router selects the experts."""
        self.pending_recompute: deque[Tensor | None] = deque()
        """Routes of the next recomputations."""

        self.recorded: list[Tensor] | None = None
        """[tokens, top_k] int16 of every micro-batch since recording started; None if off."""
        self.agreeing: Tensor | float = 0.0
        """Number of prescribed routes that equal the router's own selection."""
        self.compared: Tensor | float = 0.0
        """Number of prescribed routes."""

    def take(self) -> Tensor | None:
        """Return the routes of the current micro-batch, integers [tokens, top_k] of any dtype.

        None if it has none.

        Raises:
            RuntimeError: no routes are left, because a micro-batch was routed too often.
        """
        # Megatron's recomputation calls the layer first without gradients, and again with gradients
        # in the backward pass. In evaluation layers are not recomputed.
        runs_twice = self.is_recomputed and self.router.training
        self.is_recomputing = runs_twice and torch.is_grad_enabled()

        queue = self.pending_recompute if self.is_recomputing else self.pending
        if not queue:
            raise RuntimeError(
                f"routing replay: the router of layer {self.layer} was called for more micro-batches than "
                "there are recorded routes. Record the routes before every forward pass"
            )

        # The recomputation must use the same experts. Otherwise its activations would not match the
        # gradients. If the router selected them, it selects the same again from the same scores.
        routes = queue.popleft()
        if runs_twice and not self.is_recomputing:
            self.pending_recompute.append(routes)
        return routes

    def replace_routes(self, chosen: Tensor, prescribed: Tensor | None) -> Tensor:
        """Replace the router's selection by prescribed experts.

        Also counts agreement and records the result, once per micro-batch.

        Args:
            chosen: [tokens, top_k] int64 selection of the router.
            prescribed: [tokens, top_k] int64 experts. Rows of -1 keep the router's selection. None
                keeps all rows.

        Returns:
            [tokens, top_k] int64 experts to use.

        Raises:
            ValueError: the shapes differ.
        """
        routes = chosen
        if prescribed is not None:
            if prescribed.shape != chosen.shape:
                raise ValueError(
                    f"routing replay: the recorded routes of layer {self.layer} have the shape "
                    f"{list(prescribed.shape)} [tokens, top_k], but the router needs "
                    f"{list(chosen.shape)}"
                )
            is_prescribed = prescribed[:, :1] >= 0
            routes = torch.where(is_prescribed, prescribed, chosen)
            if not self.is_recomputing:
                self._count_agreement(chosen, prescribed, is_prescribed[:, 0])

        # Record the experts in use instead of the router's own selection.
        if self.recorded is not None and not self.is_recomputing:
            self.recorded.append(routes.to(torch.int16))
        return routes

    def _count_agreement(self, chosen: Tensor, prescribed: Tensor, is_prescribed: Tensor) -> None:
        """Count the tokens for which both select the same set of experts."""
        # Compare sorted experts, because their order does not change the output. Counters stay on
        # the GPU, because reading a counter would make every layer wait.
        chosen_sets = chosen.sort(dim=-1).values
        prescribed_sets = prescribed.sort(dim=-1).values
        is_same = (chosen_sets == prescribed_sets).all(dim=-1)
        self.agreeing += (is_same & is_prescribed).sum()
        self.compared += is_prescribed.sum()


class RoutingReplay:
    """Routing replay for all layers of one rank: prescription, recording and agreement."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Attach a ``LayerReplay`` to each router of ``model``."""
        self.layers: list[LayerReplay] = []
        """Replays in the order of the layers."""
        # A pipeline rank has some of the layers, so each replay stores its number in the model.
        for module in model.modules():
            if isinstance(module, TopKRouter):
                module.replay = LayerReplay(module, module.layer_number - 1)
                self.layers.append(module.replay)

    def prescribe(self, batch: PackedBatch) -> None:
        """Queue the routes of the next micro-batch.

        Routes come from an engine or from a recording of this rank. If the batch has neither, the
        routers select the experts.

        Args:
            batch: tokens of this context-parallel rank. ``routed_experts`` has the layers of the
                whole model.
        """
        if batch.recorded_routes is not None:
            # Routers select the experts of padding, as with routes from an engine.
            is_padding = _local_tokens(batch.is_padding)[:, None]
            for layer, recorded in zip(self.layers, batch.recorded_routes.layers, strict=True):
                recorded = recorded.to(is_padding.device).long()
                layer.pending.append(torch.where(is_padding, -1, recorded))
            return

        # [tokens of this context-parallel rank, layers, top_k] -> the tokens that this
        # tensor-parallel rank routes. Entries of padding are -1.
        routes = batch.routed_experts
        if routes is not None:
            routes = expert_numbers(_local_tokens(routes))
        for layer in self.layers:
            layer.pending.append(None if routes is None else routes[:, layer.layer])

    def check_consumed(self) -> None:
        """Raise RuntimeError if prescribed routes have not been used."""
        for layer in self.layers:
            if layer.pending or layer.pending_recompute:
                raise RuntimeError(
                    f"routing replay: the router of layer {layer.layer} has not used the recorded routes "
                    f"of {len(layer.pending)} micro-batches in the forward pass, and of "
                    f"{len(layer.pending_recompute)} in recomputation"
                )

    def agreement(self) -> dict[str, float]:
        """Return the counts since the last call, summed over all ranks. Collective.

        Returns:
            ``routes_compared``, the number of prescribed (token, layer) routes, and
            ``routes_agreeing``, the number of routes that equal the router's own selection.
        """
        # Reading counters waits for the GPU, so it happens once per step.
        agreeing = float(sum(layer.agreeing for layer in self.layers))
        compared = float(sum(layer.compared for layer in self.layers))
        for layer in self.layers:
            layer.agreeing = 0.0
            layer.compared = 0.0

        counts = torch.tensor([agreeing, compared], dtype=torch.double, device=self._device)
        dist.all_reduce(counts)
        return {"routes_agreeing": float(counts[0]), "routes_compared": float(counts[1])}

    def start_recording(self) -> None:
        """Start to record the routes of all micro-batches."""
        for layer in self.layers:
            layer.recorded = []

    def recorded(self) -> list[RecordedRoutes]:
        """Stop recording, and return the routes of every micro-batch on this rank."""
        # [layer][micro-batch] -> [micro-batch][layer]
        by_layer = [layer.recorded or [] for layer in self.layers]
        for layer in self.layers:
            layer.recorded = None
        return [RecordedRoutes(list(routes)) for routes in zip(*by_layer, strict=True)]

    @property
    def _device(self) -> torch.device:
        """Device of the routers."""
        device: torch.device = next(self.layers[0].router.parameters()).device
        return device


def _local_tokens(per_token: Tensor) -> Tensor:
    """Return the tokens [tokens / tensor, ...] that this tensor-parallel rank routes."""
    # Sequence parallelism splits the tokens over tensor-parallel ranks.
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return per_token.tensor_split(size)[rank]


def expert_numbers(routes: Tensor) -> Tensor:
    """Return routes [...] of any dtype of ``megatron_gptoss.routes`` as int64 [...].

    Unknown experts become -1.
    """
    wide = routes.long()
    if routes.dtype != torch.uint8:
        return wide
    return torch.where(wide == unknown_route(ROUTE_DTYPES[0]), -1, wide)
