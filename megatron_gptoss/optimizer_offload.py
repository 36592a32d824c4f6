"""Optimizer state that rests in host memory between steps. Its update stays on the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class _StateEntry:
    """One tensor of the optimizer's state, such as a parameter's first moment."""

    parameter: torch.Tensor
    name: str
    state: dict[str, Any]
    """Of the parameter; holds the tensor under ``name``."""

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self.state[self.name]
        return tensor

    @tensor.setter
    def tensor(self, tensor: torch.Tensor) -> None:
        self.state[self.name] = tensor


class OffloadedState:
    """Keeps ``fraction`` of the state of Megatron's ``optimizer`` in host memory.

    Whole parameters are offloaded, the first ones of each chained optimizer.
    """

    def __init__(self, optimizer: Any, fraction: float) -> None:
        inner = [chained.optimizer for chained in optimizer.chained_optimizers]
        # A rank may have no parameter of some kind.
        self._optimizers = [optimizer for optimizer in inner if optimizer is not None]
        self._fraction = fraction
        self._host: dict[tuple[torch.Tensor, str], torch.Tensor] = {}

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep all state beside its parameters in the block, as steps and checkpoints need it."""
        for entry in self._offloaded_entries():
            entry.tensor = entry.tensor.to(entry.parameter.device, non_blocking=True)

        yield

        for entry in self._offloaded_entries():
            entry.tensor = self._host_buffer(entry).copy_(entry.tensor, non_blocking=True)

    def _offloaded_entries(self) -> Iterator[_StateEntry]:
        for optimizer in self._optimizers:
            parameters = []
            for group in optimizer.param_groups:
                parameters += group["params"]

            elements_left = self._fraction * sum(parameter.numel() for parameter in parameters)
            for parameter in parameters:
                if elements_left <= 0:
                    break
                elements_left -= parameter.numel()

                # A list of names, because the caller replaces the tensors, and the memory of each
                # must be free at once.
                state = optimizer.state.get(parameter, {})
                for name in list(state):
                    if isinstance(state[name], torch.Tensor) and state[name].dim():
                        yield _StateEntry(parameter, name, state)

    def _host_buffer(self, entry: _StateEntry) -> torch.Tensor:
        """Return where the tensor rests: the same pinned memory after every step."""
        key = (entry.parameter, entry.name)
        if key not in self._host:
            self._host[key] = torch.empty_like(
                entry.tensor,
                device="cpu",
                pin_memory=torch.cuda.is_available(),
            )
        return self._host[key]
