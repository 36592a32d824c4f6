"""Where the time of a training step goes, without making the step wait for it.

On a GPU marks are CUDA events on the stream that computes, read when the step is over: communication is what that
stream waits for, not what other work hides."""

import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

OWN_NAMES = {"forward-compute": "forward", "backward-compute": "backward", "forward-backward": "other"}
"""Of what Megatron times; all else is communication: messages between pipeline stages, gradients that are summed."""


class StepClock:
    """What Megatron takes for ``timers``. A part that begins within another interrupts it."""

    def __init__(self) -> None:
        self._marks: list[tuple[Any, str]] | None = None
        self._parts: list[str] = []

    def __call__(self, name: str, log_level: int = 0) -> Any:
        """A timer, without the barrier that Megatron asks for, which would make the step slower."""
        part = OWN_NAMES.get(name, "communication")
        return SimpleNamespace(start=lambda barrier=False: self.enter(part), stop=self.leave)

    def begin(self) -> None:
        """The step begins; outside of steps nothing is timed."""
        self._marks, self._parts = [], []
        self.enter("other")

    def enter(self, part: str) -> None:
        self._parts.append(part)
        self._mark()

    def leave(self) -> None:
        self._parts.pop()
        self._mark()

    def _mark(self) -> None:
        if self._marks is not None:
            now: Any = time.perf_counter()
            if torch.cuda.is_available():
                now = torch.cuda.Event(enable_timing=True)
                now.record()
            self._marks.append((now, self._parts[-1]))

    def end(self) -> dict[str, float]:
        """Seconds of every part. Waits for the GPU."""
        self._mark()
        marks, self._marks = self._marks or [], None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = dict.fromkeys(("forward", "backward", "optimizer", "communication", "other"), 0.0)
        for (start, part), (stop, _) in pairwise(marks):
            seconds[part] += stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1000
        return seconds


class TimedMoELayer(MoELayer):
    """Counts the way of tokens to their experts and back as communication, that of their gradients too."""

    clock: StepClock | None = None
    """The trainer's."""

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        tokens, probs = super().dispatch(self._mark(hidden_states, True), probs)
        return self._mark(tokens, False), probs

    def combine(self, output: Tensor) -> Tensor:
        return self._mark(super().combine(self._mark(output, True)), False)

    def _mark(self, x: Tensor, begins: bool) -> Tensor:
        return x if self.clock is None else _Mark.apply(x, self.clock("all-to-all"), begins)


class _Mark(torch.autograd.Function):
    """The identity, where a timer starts or, if it does not begin here, stops; for gradients the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, timer: Any, begins: bool) -> Tensor:
        ctx.timer, ctx.begins = timer, begins
        (timer.start if begins else timer.stop)()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ctx.timer.stop if ctx.begins else ctx.timer.start)()
        return grad, None, None
