"""Where the time of a training step goes, without making the step wait for it.

On a GPU, marks are CUDA events on the stream that computes, read when the step is over:
communication is what that stream waits for, not what other work hides.
"""

import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

PARTS = ("forward", "backward", "optimizer", "communication", "other")

ALL_TO_ALL = "all-to-all"
"""Name of the timer around what sends tokens to their experts and back."""

PART_OF_TIMER = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "forward-backward": "other",
}
"""Names of Megatron's timers. All others are communication: messages between pipeline stages,
gradients that are summed."""


class StepClock:
    """Times the parts of a step; is what Megatron takes for ``timers``.

    A part that begins within another interrupts it.
    """

    parts: tuple[str, ...] = PARTS
    """What a step is divided into."""

    def __init__(self) -> None:
        self._marks: list[tuple[Any, str]] | None = None
        """(when, part that begins then) in order; None outside of steps."""
        self._parts: list[str] = []
        """Those that have begun, the innermost last."""

    def __call__(self, name: str, log_level: int = 0) -> Any:
        """Return a timer for Megatron.

        It does without the barrier that Megatron asks for, which would make the step slower.
        """
        part = PART_OF_TIMER.get(name, "communication")
        return SimpleNamespace(start=lambda barrier=False: self.enter(part), stop=self.leave)

    def begin(self) -> None:
        """Begin a step; outside of steps nothing is timed."""
        self._marks = []
        self._parts = []
        self.enter("other")

    def enter(self, part: str) -> None:
        """Begin a part, one of ``parts``."""
        self._parts.append(part)
        self._mark()

    def leave(self) -> None:
        """End the innermost part; the one around it goes on."""
        self._parts.pop()
        self._mark()

    def end(self) -> dict[str, float]:
        """End the step and return the seconds of every part. Waits for the GPU."""
        self._mark()
        marks = self._marks or []
        self._marks = None
        # The times of events are known only when the GPU has passed them.
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
        if self._marks is None:
            return

        now: Any = time.perf_counter()
        # The event says when the GPU gets here; the host does not wait for it.
        if torch.cuda.is_available():
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((now, self._parts[-1]))


OF_ONE_FORWARD_PASS = ("probs", "routing_map", "reversed_local_input_permutation_mapping")
"""Tensors of all tokens that Megatron's all-to-all dispatcher holds from one forward pass of its
layer to the next."""


class TimedMoELayer(MoELayer):
    """Counts sending tokens to their experts and back, and their gradients, as communication.

    Unlike its parent it keeps neither graph nor tensors when the forward pass is over.
    """

    clock: StepClock | None = None
    """Set by the trainer."""

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        tokens, probs = super().dispatch(self._start_timer(hidden_states), probs)
        return self._stop_timer(tokens), probs

    def combine(self, output: Tensor) -> Tensor:
        return self._stop_timer(super().combine(self._start_timer(output)))

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        result: Tensor = super().postprocess(output, shared_expert_output)
        # The dispatcher would keep the gates until the next micro-batch, and with them the graph of
        # all layers below. That graph refers to the model by ways that Python's garbage collector
        # does not see: the model would never be freed. It would keep the order of the tokens, too,
        # 4 MB for 16,384 of them: torch can give back no block that such a tensor was cut out of.
        for name in OF_ONE_FORWARD_PASS:
            if hasattr(self.token_dispatcher, name):
                setattr(self.token_dispatcher, name, None)
        return result

    def _start_timer(self, x: Tensor) -> Tensor:
        if self.clock is None:
            return x
        return _StartTimer.apply(x, self.clock(ALL_TO_ALL))

    def _stop_timer(self, x: Tensor) -> Tensor:
        if self.clock is None:
            return x
        return _StopTimer.apply(x, self.clock(ALL_TO_ALL))


class _StartTimer(torch.autograd.Function):
    """The identity; starts a timer in the forward pass and stops it in the backward pass."""

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
    """The identity; stops a timer in the forward pass and starts it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, timer: Any) -> Tensor:
        ctx.timer = timer
        timer.stop()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.timer.start()
        return grad, None
