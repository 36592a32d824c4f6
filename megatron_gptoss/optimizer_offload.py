"""Optimizer state that rests in host memory between steps. Its update stays on the GPU.

The state of a few parameters at a time is made or fetched, updated and sent back, so that offloaded
state is never on the GPU as a whole: neither in the first step, which makes it, nor later, nor
while a checkpoint is saved or loaded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_gptoss.block_sizes import PART_ELEMENTS


class OffloadedState:
    """Keeps ``fraction`` of the state of Megatron's ``optimizer`` in host memory.

    Whole parameters are offloaded, the first ones of each chained optimizer. From the construction
    on, a step of the optimizer fetches their state part by part.
    """

    def __init__(
        self,
        optimizer: Any,
        fraction: float,
        part_elements: int = PART_ELEMENTS,
    ) -> None:
        """``part_elements``: see PART_ELEMENTS."""
        self._host: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._optimizer_of: dict[torch.Tensor, Any] = {}
        """Of every offloaded parameter."""

        for chained in optimizer.chained_optimizers:
            # A rank may have no parameter of some kind.
            inner = chained.optimizer
            if inner is None:
                continue
            offloaded = _first_parameters(inner, fraction)
            if offloaded:
                self._optimizer_of |= dict.fromkeys(offloaded, inner)
                self._step_in_parts(inner, _split(offloaded, part_elements))

    def rest(self, parameter: torch.Tensor) -> None:
        """Bring a parameter's state to host memory if that is its place."""
        inner = self._optimizer_of.get(parameter)
        if inner is None:
            return

        state = inner.state.get(parameter, {})
        for name in _tensor_names(state):
            key = (parameter, name)
            if key not in self._host:
                # The same pinned memory after every step.
                self._host[key] = torch.empty_like(
                    state[name],
                    device="cpu",
                    pin_memory=torch.cuda.is_available(),
                )
            if state[name] is not self._host[key]:
                state[name] = self._host[key].copy_(state[name], non_blocking=True)

    def rest_all(self) -> None:
        """Bring to host memory all state whose place that is, as after a checkpoint was loaded."""
        for parameter in self._optimizer_of:
            self.rest(parameter)

    def wait(self) -> None:
        """Wait until the host's copies are complete, as before a checkpoint reads them."""
        if self._host and torch.cuda.is_available():
            torch.cuda.synchronize()

    @contextmanager
    def _on_device(self, part: Sequence[torch.Tensor]) -> Iterator[None]:
        """Keep the state of ``part`` beside its parameters in the block."""
        # Copies and the update share a stream, so each waits for the one before. In the first step
        # there is nothing to fetch: the block makes the state.
        for parameter in part:
            state = self._optimizer_of[parameter].state.get(parameter, {})
            for name in _tensor_names(state):
                state[name] = state[name].to(parameter.device, non_blocking=True, copy=True)

        yield

        for parameter in part:
            self.rest(parameter)

    def _step_in_parts(self, inner: Any, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Let ``inner.step`` update what stays on the GPU, then one part after the other.

        Covers the method of the class by an attribute of the instance.
        """
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
    """Yield ``update(step, is_chosen)``, which steps some of the parameters; all updates in the
    block are one step. Afterwards the groups have all their parameters again."""
    groups = inner.param_groups
    parameters = [group["params"] for group in groups]

    # Transformer Engine's Adam counts steps by group, those without parameters in some versions
    # only. Every part begins with the count of before, and the groups keep what it became.
    counts_before = [group.get("step") for group in groups]
    counts_after = list(counts_before)

    def update(step: Callable[[], Any], is_chosen: Callable[[torch.Tensor], bool]) -> None:
        for group, everything, count in zip(groups, parameters, counts_before, strict=True):
            group["params"] = [parameter for parameter in everything if is_chosen(parameter)]
            _set_count(group, count)
        step()
        # A group that has parameters but none in this part keeps the count of a part that had some:
        # this step may have counted it, or not.
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
    """Set the count of steps of a group, which has none before its first."""
    if count is None:
        group.pop("step", None)
    else:
        group["step"] = count


def _first_parameters(inner: Any, fraction: float) -> list[torch.Tensor]:
    """Return the first parameters, as many as hold ``fraction`` of all elements."""
    parameters: list[torch.Tensor] = []
    for group in inner.param_groups:
        parameters += group["params"]

    # Of the distributed optimizer these are the shards that this rank updates, not whole weights.
    elements_left = fraction * sum(parameter.numel() for parameter in parameters)
    first = []
    for parameter in parameters:
        if elements_left <= 0:
            break
        elements_left -= parameter.numel()
        first.append(parameter)
    return first


def _split(parameters: Sequence[torch.Tensor], elements: int) -> list[list[torch.Tensor]]:
    """Split parameters into parts of at most ``elements`` elements, or of one parameter."""
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
    """Return the names of a parameter's tensors; counters of steps are none of them."""
    # A list, because the caller replaces the tensors.
    return [
        name for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim()
    ]
