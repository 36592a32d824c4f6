"""Timing of a training step's parts, without synchronization during the step.

On a GPU, marks are CUDA events on the compute stream, read at the end of the step. Communication is
the time for which this stream waits. Overlapped communication does not count.
"""

import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gptoss.token_dispatcher import AlltoAllTokenDispatcher

PARTS = ("forward", "backward", "optimizer", "communication", "other")
"""Parts of a training step."""

ALL_TO_ALL = "all-to-all"
"""Name of the timer for sending tokens to experts and back."""

PART_BY_TIMER = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "forward-backward": "other",
}
"""Part that each of Megatron's timers measures.

All other timers are communication: messages between pipeline stages and reduction of gradients.
"""


class StepClock:
    """Clock for the parts of a step. Megatron uses it as ``timers``.

    A part that starts within another part interrupts it.
    """

    parts: tuple[str, ...] = PARTS
    """Names of the parts."""

    def __init__(self) -> None:
        self._marks: list[tuple[Any, str]] | None = None
        """(time or CUDA event, part that starts then) in order; None outside of steps."""
        self._parts: list[str] = []
        """Running parts, innermost last."""

    def __call__(self, name: str, log_level: int = 0) -> Any:
        """Return a timer for Megatron.

        Args:
            name: name of the timer.
            log_level: Megatron's log level; unused.
        """
        # Megatron requests a barrier for some timers. It would slow the step down.
        part = PART_BY_TIMER.get(name, "communication")
        return SimpleNamespace(start=lambda barrier=False: self.enter(part), stop=self.leave)

    def begin(self) -> None:
        """Start a step. Parts outside of steps are not timed."""
        self._marks = []
        self._parts = []
        self.enter("other")

    def enter(self, part: str) -> None:
        """Start a part, one of ``parts``."""
        self._parts.append(part)
        self._mark()

    def leave(self) -> None:
        """End the innermost part. The part around it continues."""
        self._parts.pop()
        self._mark()

    def end(self) -> dict[str, float]:
        """End the step and return the seconds by part. Waits for the GPU."""
        self._mark()
        marks = self._marks or []
        self._marks = None
        # Events have a time only after the GPU has reached them.
        if torch.cuda.is_available():
            torch.cuda.synchronize()

        seconds = dict.fromkeys(self.parts, 0.0)
        for (start, part), (stop, _) in pairwise(marks):
            if isinstance(start, float):
                seconds[part] += stop - start
            else:
                seconds[part] += start.elapsed_time(stop) / 1000
        return seconds

    def _mark(self) -> None:
        """Store the time at which the innermost part starts or continues."""
        if self._marks is None:
            return

        now: Any = time.perf_counter()
        # The GPU records the time of the event. The host does not wait.
        if torch.cuda.is_available():
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((now, self._parts[-1]))


FORWARD_PASS_ATTRIBUTES = ("probs", "routing_map", "reversed_local_input_permutation_mapping")
"""Attributes of Megatron's all-to-all dispatcher that keep tensors until the next forward pass."""


class TimedMoELayer(MoELayer):
    """MoE layer that counts the exchange of tokens and their gradients as communication.

    Unlike Megatron's layer, it keeps no graph and no tensors after the forward pass.
    """

    dispatcher_class: type[AlltoAllTokenDispatcher] = AlltoAllTokenDispatcher
    """Class that replaces Megatron's all-to-all dispatcher."""
    clock: StepClock | None = None
    """Clock of the trainer, which sets it; None to measure nothing."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # Megatron's layer cannot be given the class of a dispatcher.
        if config.moe_token_dispatcher_type == "alltoall":
            self.token_dispatcher = self.build_dispatcher(kwargs["pg_collection"])

    def build_dispatcher(self, groups: ProcessGroupCollection) -> AlltoAllTokenDispatcher:
        """Return a dispatcher for the experts of this rank.

        Args:
            groups: process groups of the layer.
        """
        return self.dispatcher_class(
            self.num_local_experts,
            self.local_expert_indices,
            config=self.config,
            pg_collection=groups,
        )

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens to their experts.

        Args:
            hidden_states: [tokens, hidden_size] in the model's dtype.
            probs: [tokens, experts] gate values.

        Returns:
            Received tokens [rows, hidden_size] and their gate values.
        """
        tokens, probs = super().dispatch(self._start_timer(hidden_states), probs)
        return self._stop_timer(tokens), probs

    def combine(self, output: Tensor) -> Tensor:
        """Send the output [rows, hidden_size], of any dtype, back to the ranks of the tokens."""
        return self._stop_timer(super().combine(self._start_timer(output)))

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Return the output of the layer, [tokens, 1, hidden_size], and release its tensors.

        Args:
            output: combined output of the experts, in the model's dtype.
            shared_expert_output: [tokens, 1, hidden_size]; None without shared experts.
        """
        result: Tensor = super().postprocess(output, shared_expert_output)
        # Otherwise the dispatcher would keep the gates, and with them the graph of all earlier
        # layers, until the next micro-batch. The graph refers to the model in ways that Python's
        # garbage collector cannot see, so the model would never be freed. The dispatcher would also
        # keep the order of tokens: 4 MB for 16,384 tokens, which keep a whole block of torch's
        # allocator in use.
        for name in FORWARD_PASS_ATTRIBUTES:
            if hasattr(self.token_dispatcher, name):
                setattr(self.token_dispatcher, name, None)
        return result

    def _start_timer(self, x: Tensor) -> Tensor:
        """Return x. Start the timer in the forward pass and stop it in the backward pass."""
        if self.clock is None or not self._exchanges_tokens:
            return x
        return _StartTimer.apply(x, self.clock(ALL_TO_ALL))

    def _stop_timer(self, x: Tensor) -> Tensor:
        """Return x. Stop the timer in the forward pass and start it in the backward pass."""
        if self.clock is None or not self._exchanges_tokens:
            return x
        return _StopTimer.apply(x, self.clock(ALL_TO_ALL))

    @property
    def _exchanges_tokens(self) -> bool:
        """True if tokens go to experts of other ranks."""
        # Megatron's other dispatchers have no such property.
        return getattr(self.token_dispatcher, "exchanges_tokens", True)


class _StartTimer(torch.autograd.Function):
    """Identity that starts a timer in the forward pass and stops it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, timer: Any) -> Tensor:
        ctx.timer = timer
        timer.start()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.timer.stop()
        return grad, None


class _StopTimer(torch.autograd.Function):
    """Identity that stops a timer in the forward pass and starts it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, timer: Any) -> Tensor:
        ctx.timer = timer
        timer.stop()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.timer.start()
        return grad, None
