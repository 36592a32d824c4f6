"""Optimizer state that rests in host memory while the optimizer does not run. Its update stays on the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class OffloadedState:
    """``fraction`` of the state of Megatron's ``optimizer``, by parameters, the first ones of each part."""

    def __init__(self, optimizer: Any, fraction: float) -> None:
        self._optimizers = [part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None]
        self._fraction = fraction
        self._host: dict[tuple[torch.Tensor, str], torch.Tensor] = {}

    def _entries(self) -> Iterator[tuple[torch.Tensor, str, dict[str, Any]]]:
        for optimizer in self._optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            left = self._fraction * sum(parameter.numel() for parameter in parameters)
            for parameter in parameters:
                if left <= 0:
                    break
                left -= parameter.numel()
                state = optimizer.state.get(parameter, {})
                for name in [name for name, x in state.items() if isinstance(x, torch.Tensor) and x.dim()]:
                    yield parameter, name, state

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, all state is beside its parameters, as steps and checkpoints need it; afterwards at rest."""
        for parameter, name, state in self._entries():
            state[name] = state[name].to(parameter.device, non_blocking=True)
        yield
        for parameter, name, state in self._entries():
            if (parameter, name) not in self._host:
                pin = torch.cuda.is_available()
                self._host[parameter, name] = torch.empty_like(state[name], device="cpu", pin_memory=pin)
            state[name] = self._host[parameter, name].copy_(state[name], non_blocking=True)
