"""Routing replay: the trainer uses experts that were chosen elsewhere, with its own gate values.

    g_i = I_i exp(s_i) / sum_j I_j exp(s_j)

I is 1 for the chosen experts and constant to autograd; the gradient goes through the scores s. Megatron-Core has a
RouterReplay of its own, but one list of routers for all models of a process (a critic's would be among them) and one
switch between forward and recomputation for all of them, which a pipeline that does both in turn cannot use."""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter


class LayerReplay:
    """The routes of one router: [tokens of this rank, top_k] for every micro-batch, in order, each used exactly once.

    A recomputed layer routes twice: without gradients first, with gradients in the backward pass. Backward passes come
    in the order of the forward passes, so a second queue serves them."""

    def __init__(self, router: Any, layer: int) -> None:
        self.router, self.layer = router, layer
        config = router.config
        self.recomputed = config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or [])
        self.given: deque[torch.Tensor | None] = deque()
        self.again: deque[torch.Tensor | None] = deque()
        self.repeated = False
        self.record: list[torch.Tensor] | None = None
        self.agreeing: torch.Tensor | float = 0.0
        self.compared: torch.Tensor | float = 0.0

    def take(self) -> torch.Tensor | None:
        """The routes of the micro-batch that now passes; None: the router chooses."""
        recomputes = self.recomputed and self.router.training
        self.repeated = recomputes and torch.is_grad_enabled()
        queue = self.again if self.repeated else self.given
        if not queue:
            raise RuntimeError(f"routing replay: the router of layer {self.layer} routes a micro-batch twice")
        routes = queue.popleft()
        if recomputes and not self.repeated:
            self.again.append(routes)
        return routes

    def replaced(self, own: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        """own: int64 [tokens, top_k] -> the same with the rows that are given (not -1). Counts equal sets and records
        what is chosen, in recomputation neither."""
        chosen = own
        if given is not None:
            if given.shape != own.shape:
                raise ValueError(
                    f"routing replay: layer {self.layer} routes {tuple(own.shape)} [tokens, top_k] and was given "
                    f"{tuple(given.shape)}"
                )
            is_given = given[:, :1] >= 0
            if not self.repeated:
                same = (own.sort(dim=-1).values == given.sort(dim=-1).values).all(dim=-1)
                self.agreeing += (same & is_given[:, 0]).sum()
                self.compared += is_given.sum()
            chosen = torch.where(is_given, given, own)
        if self.record is not None and not self.repeated:
            self.record.append(chosen.to(torch.int16))
        return chosen


class RoutingReplay:
    """Gives the routers of one model part their routes, records what they choose, and counts agreement."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.layers: list[LayerReplay] = []
        for module in model.modules():
            if isinstance(module, TopKRouter):
                module.replay = LayerReplay(module, module.layer_number - 1)
                self.layers.append(module.replay)

    def give(self, routes: torch.Tensor | None) -> None:
        """routes: int16 [tokens, layers, top_k] of the next micro-batch, this context-parallel rank's tokens and the
        layers of the whole model; None lets the routers choose."""
        if routes is not None:
            size = parallel_state.get_tensor_model_parallel_world_size()  # sequence parallelism: a part of the tokens
            routes = routes.tensor_split(size)[parallel_state.get_tensor_model_parallel_rank()].long()
        for layer in self.layers:
            layer.given.append(None if routes is None else routes[:, layer.layer])

    def check_consumed(self) -> None:
        """Raises RuntimeError if a route that was given has not been used."""
        for layer in self.layers:
            if layer.given or layer.again:
                raise RuntimeError(
                    f"routing replay: layer {layer.layer} left routes of {len(layer.given)} micro-batches unused, "
                    f"and of {len(layer.again)} in recomputation"
                )

    def agreement(self) -> dict[str, float]:
        """Since the last call, over all ranks: how many given (token, layer) routes there were, and how many the router
        would have chosen itself. Collective."""
        device = next(self.layers[0].router.parameters()).device
        totals = float(sum(x.agreeing for x in self.layers)), float(sum(x.compared for x in self.layers))
        counts = torch.tensor(totals, dtype=torch.double, device=device)
        for layer in self.layers:
            layer.agreeing = layer.compared = 0.0
        dist.all_reduce(counts)
        return {"routes_agreeing": float(counts[0]), "routes_compared": float(counts[1])}

    def start_recording(self) -> None:
        for layer in self.layers:
            layer.record = []

    def recorded(self) -> list[torch.Tensor]:
        """int32 [tokens, layers, top_k] for every micro-batch since ``start_recording``: all layers, and the tokens in
        the order in which context-parallel ranks hold them, on every rank. Collective."""
        device = next(self.layers[0].router.parameters()).device
        stages = parallel_state.get_pipeline_model_parallel_group()
        most = torch.tensor(len(self.layers), device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=stages)
        missing = [-1] * (int(most) - len(self.layers))  # the last stage may have fewer layers
        micro_batches = [
            torch.nn.functional.pad(torch.stack(parts, dim=1), (0, 0, 0, len(missing)))
            for parts in zip(*(x.record or [] for x in self.layers), strict=True)
        ]
        for layer in self.layers:
            layer.record = None
        groups = (
            (parallel_state.get_tensor_model_parallel_group(), 0),
            (parallel_state.get_context_parallel_group(), 0),
            (stages, 1),
        )
        layers = _gathered(torch.tensor([[x.layer for x in self.layers] + missing], device=device), groups[2:])[0]
        order = layers.argsort()[int((layers < 0).sum()) :]  # chunks of different ranks alternate
        return [_gathered(routes, groups)[:, order] for routes in micro_batches]


def _gathered(routes: torch.Tensor, groups: tuple[tuple[dist.ProcessGroup, int], ...]) -> torch.Tensor:
    routes = routes.int()  # gloo and NCCL know no int16
    for group, dim in groups:
        if group.size() > 1:
            parts = [torch.empty_like(routes) for _ in range(group.size())]
            dist.all_gather(parts, routes.contiguous(), group=group)
            routes = torch.cat(parts, dim=dim)
    return routes
