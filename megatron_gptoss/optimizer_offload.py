"""Offloading of optimizer state to host memory between steps. Updates run on the GPU.

The state of a few parameters at a time is created or fetched, updated and sent back. The whole
offloaded state is never on the GPU: neither in a step, nor while a checkpoint is saved or loaded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_gptoss.block_sizes import PART_ELEMENTS


class OffloadedState:
    """Part of an optimizer's state that is kept in host memory.

    The state of whole parameters is offloaded: the first parameters of each chained optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        fraction: float,
        part_elements: int = PART_ELEMENTS,
    ) -> None:
        """Change the optimizer, so that its steps fetch offloaded state in parts.

        Args:
            optimizer: chain of Megatron optimizers.
            fraction: fraction of the elements of each chained optimizer whose state is offloaded,
                from 0 to 1. Rounded up to whole parameters.
            part_elements: maximum elements per part, see PART_ELEMENTS.
        """
        self._host: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        """Pinned memory by parameter and name of the state."""
        self._optimizer_of: dict[torch.Tensor, Any] = {}
        """Optimizer of every offloaded parameter."""

        for chained in optimizer.chained_optimizers:
            # A rank may have no parameters for one of the optimizers.
            inner = chained.optimizer
            if inner is None:
                continue
            offloaded = _first_parameters(inner, fraction)
            if offloaded:
                self._optimizer_of |= dict.fromkeys(offloaded, inner)
                self._step_in_parts(inner, _split(offloaded, part_elements))

    def offload(self, parameter: torch.Tensor) -> None:
        """Copy the optimizer state of ``parameter`` (any shape and dtype) to the host.

        Does nothing if its state is not offloaded.
        """
        inner = self._optimizer_of.get(parameter)
        if inner is None:
            return

        state = inner.state.get(parameter, {})
        for name in _tensor_names(state):
            key = (parameter, name)
            if key not in self._host:
                # Allocate pinned memory once, because pinning is slow.
                self._host[key] = torch.empty_like(
                    state[name],
                    device="cpu",
                    pin_memory=torch.cuda.is_available(),
                )
            if state[name] is not self._host[key]:
                state[name] = self._host[key].copy_(state[name], non_blocking=True)

    def offload_all(self) -> None:
        """Move all offloaded state to the host, for example after loading a checkpoint."""
        for parameter in self._optimizer_of:
            self.offload(parameter)

    def wait(self) -> None:
        """Wait until the copies to the host are complete. Call it before reading the state."""
        if self._host and torch.cuda.is_available():
            torch.cuda.synchronize()

    @contextmanager
    def _on_device(self, part: Sequence[torch.Tensor]) -> Iterator[None]:
        """Keep the state of ``part`` on the device of its parameters in the block."""
        # Copies and updates use the same stream, so they run in order. In the first step there is
        # no state to fetch; the block creates it.
        for parameter in part:
            state = self._optimizer_of[parameter].state.get(parameter, {})
            for name in _tensor_names(state):
                state[name] = state[name].to(parameter.device, non_blocking=True, copy=True)

        yield

        for parameter in part:
            self.offload(parameter)

    def _step_in_parts(self, inner: Any, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Change ``inner.step`` to update the state on the GPU first, and then each part."""
        # Megatron calls ``inner.step()`` without a closure and does not use its result, so the
        # replacement needs neither. Set on the instance, it hides the method of the class.
        step = inner.step

        def step_in_parts() -> None:
            with _restored_groups(inner) as update:
                update(step, lambda parameter: parameter not in self._optimizer_of)
                for part in parts:
                    chosen = set(part)
                    with self._on_device(part):
                        update(step, chosen.__contains__)

        inner.step = step_in_parts


@contextmanager
def _restored_groups(
    inner: Any,
) -> Iterator[Callable[[Callable[[], Any], Callable[[torch.Tensor], bool]], None]]:
    """Yield a function ``update(step, is_chosen)`` that steps some of the parameters.

    All updates in the block count as one step. Afterwards the groups have all parameters again.
    """
    groups = inner.param_groups
    parameters = [group["params"] for group in groups]

    # Transformer Engine's Adam counts steps per group. Only some versions count a step for groups
    # without parameters. Every part starts with the previous count, and groups keep the new one.
    counts_before = [group.get("step") for group in groups]
    counts_after = list(counts_before)

    def update(step: Callable[[], Any], is_chosen: Callable[[torch.Tensor], bool]) -> None:
        for group, everything, count in zip(groups, parameters, counts_before, strict=True):
            group["params"] = [parameter for parameter in everything if is_chosen(parameter)]
            _set_count(group, count)
        step()
        # If a group has no parameters in this part, its count may be wrong. Keep the count from a
        # part that contains some of its parameters.
        for number, group in enumerate(groups):
            if group["params"] or not parameters[number]:
                counts_after[number] = group.get("step")

    try:
        yield update
    finally:
        for group, everything, count in zip(groups, parameters, counts_after, strict=True):
            group["params"] = everything
            _set_count(group, count)


def _set_count(group: dict[str, Any], count: Any) -> None:
    """Set the step count of a group. None removes it, as before the first step."""
    if count is None:
        group.pop("step", None)
    else:
        group["step"] = count


def _first_parameters(inner: Any, fraction: float) -> list[torch.Tensor]:
    """Return the first parameters that together have at least ``fraction`` of all elements."""
    parameters: list[torch.Tensor] = []
    for group in inner.param_groups:
        parameters += group["params"]

    # With the distributed optimizer these are the parts of weights that this rank updates.
    elements_left = fraction * sum(parameter.numel() for parameter in parameters)
    first = []
    for parameter in parameters:
        if elements_left <= 0:
            break
        elements_left -= parameter.numel()
        first.append(parameter)
    return first


def _split(parameters: Sequence[torch.Tensor], elements: int) -> list[list[torch.Tensor]]:
    """Divide parameters into parts of at most ``elements`` elements, or of one larger parameter."""
    parts: list[list[torch.Tensor]] = []
    size = 0
    for parameter in parameters:
        if not parts or size + parameter.numel() > elements:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += parameter.numel()
    return parts


def _tensor_names(state: dict[str, Any]) -> list[str]:
    """Return the names of the tensors in a parameter's state, without step counters."""
    # A list, because the caller replaces the tensors.
    return [
        name for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim()
    ]
