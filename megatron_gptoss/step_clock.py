"""Timing of a training step's parts, without synchronization during the step.

On a GPU, marks are CUDA events on the compute stream, read at the end of the step. Communication is
the time for which this stream waits. Overlapped communication does not count.
"""

import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

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

Megatron's other timers are communication: messages between pipeline stages and reduction of
gradients.
"""


class StepClock:
    """Clock for the parts of a step. Megatron uses it as ``timers``.

    A part that starts within another part interrupts it.
    """

    parts: tuple[str, ...] = PARTS
    """Names of the parts."""

    def __init__(self) -> None:
        self._marks: list[tuple[Any, str]] | None = None
        """Marks of the step in order; None outside of steps.

        A mark is (time or CUDA event, part that starts or continues at that time).
        """
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
        self._record_time()

    def leave(self) -> None:
        """End the innermost part. The part around it continues."""
        self._parts.pop()
        self._record_time()

    def end(self) -> dict[str, float]:
        """End the step and return the seconds by part. Waits for the GPU."""
        self._record_time()
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

    def _record_time(self) -> None:
        """Store the time at which the innermost part starts or continues."""
        if self._marks is None:
            return

        now: Any = time.perf_counter()
        # The GPU records the time of the event. The host does not wait.
        if torch.cuda.is_available():
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((now, self._parts[-1]))


def start_all_to_all(clock: StepClock | None, x: Tensor) -> Tensor:
    """Return ``x``, and time the all-to-all that follows it.

    Args:
        clock: clock of the trainer; None to measure nothing.
        x: input of the all-to-all in the forward pass. In the backward pass, its gradient ends the
            all-to-all.
    """
    if clock is None:
        return x
    return _StartTimer.apply(x, clock(ALL_TO_ALL))


def stop_all_to_all(clock: StepClock | None, x: Tensor) -> Tensor:
    """Return ``x``, and end the time of the all-to-all that returned it.

    Args:
        clock: clock of the trainer; None to measure nothing.
        x: output of the all-to-all in the forward pass. In the backward pass, its gradient starts
            the all-to-all.
    """
    if clock is None:
        return x
    return _StopTimer.apply(x, clock(ALL_TO_ALL))


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
