"""The scalars of one step: how each is reduced over optimizer steps and rollout rounds, and where it is written.

A metric is kept as what is needed to reduce it exactly (a mean as its sum and its count), never as an already divided
number: the mean of two parts' means is wrong as soon as the parts hold different numbers of tokens. The same values go
to ``metrics.jsonl``, TensorBoard and the progress display.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rl_loop.run_directory import RunDirectory, append_lines, atomic_write_text, read_json

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


Reduction = Literal["mean", "sum", "max", "last"]
"""How parts of one step become one number."""


class Name:
    """The metrics that the progress display and the report know by name; any other name is written and plotted too."""

    REWARD = "reward"  # mean over sequences
    ACCURACY = "accuracy"  # mean over sequences of the training tasks
    HELD_OUT_ACCURACY = "held_out/accuracy"  # mean over sequences; only on steps that evaluate
    HELD_OUT_TOOL_CALL_RATE = "held_out/tool_call_rate"
    HELD_OUT_TURNS = "held_out/turns"
    TOOL_CALL_RATE = "tool_call_rate"  # share of sequences with at least one tool call
    TURNS = "turns"  # assistant turns, mean over sequences
    RESPONSE_TOKENS = "response_tokens"  # sampled tokens, mean over sequences
    LOSS = "loss"  # as aggregated; of several optimizer steps the mean
    LOGPROB_GAP = "mismatch/logprob_gap"  # |log pi_train - log pi_rollout|, mean over sampled tokens, nats
    KL = "mismatch/kl_k3"  # k3 estimate of KL(rollout || train), mean over sampled tokens, nats
    CLIP_FRACTION = "clip_fraction"  # share of sampled tokens whose ratio was clipped
    GRAD_NORM = "grad_norm"  # before clipping, last
    ENTROPY = "entropy"  # of the sampling distribution, mean over sampled tokens, nats
    LEARNING_RATE = "learning_rate"  # last
    TOKENS_PER_SECOND = "tokens_per_second"  # sampled and trained tokens of the step per second of wall time
    STEP_SECONDS = "seconds/step"  # wall time of the step


@dataclass(frozen=True)
class Scalar:
    """One metric of one step, still reducible. ``total`` is a sum for mean and sum, else the value itself."""

    total: float
    count: float  # what a mean divides by; 1 otherwise
    reduction: Reduction
    over: str  # "tokens", "sequences", "steps": what one count is

    @property
    def value(self) -> float:
        return self.total / self.count if self.reduction == "mean" else self.total

    @property
    def description(self) -> str:
        """Such as "mean over tokens"."""
        return f"{self.reduction} over {self.over}"

    def merged(self, other: Scalar) -> Scalar:
        """This and a later part of the same metric."""
        if self.reduction in ("mean", "sum"):
            return Scalar(self.total + other.total, self.count + other.count, self.reduction, self.over)
        if self.reduction == "last":
            return other
        # A NaN must survive: max(1.0, nan) is 1.0 in Python, and a hidden NaN is exactly what metrics are for.
        parts = (self.total, other.total)
        value = math.nan if any(map(math.isnan, parts)) else max(parts)
        return Scalar(value, 1.0, self.reduction, self.over)


@dataclass
class StepMetrics:
    """Every scalar of one step. Adding a name again merges into it, so micro-batches simply add their parts."""

    step: int
    scalars: dict[str, Scalar] = field(default_factory=dict)

    def add_mean(self, name: str, total: float, count: float, over: str) -> None:
        """A mean given as its sum and the number of things summed. ``over`` names them: "tokens", "sequences"."""
        self._add(name, Scalar(float(total), float(count), "mean", over))

    def add_sum(self, name: str, value: float, over: str) -> None:
        self._add(name, Scalar(float(value), 1.0, "sum", over))

    def add_max(self, name: str, value: float, over: str) -> None:
        self._add(name, Scalar(float(value), 1.0, "max", over))

    def add_last(self, name: str, value: float, over: str = "steps") -> None:
        """A value that is the same on every rank, such as the learning rate; of several, the newest wins."""
        self._add(name, Scalar(float(value), 1.0, "last", over))

    def values(self) -> dict[str, float]:
        """name -> reduced value. A mean over nothing has no value and is left out; NaN and infinity are kept."""
        return {
            name: scalar.value
            for name, scalar in self.scalars.items()
            if not (scalar.reduction == "mean" and scalar.count == 0)
        }

    def descriptions(self) -> dict[str, str]:
        """name -> "mean over tokens" and the like."""
        return {name: scalar.description for name, scalar in self.scalars.items()}

    def _add(self, name: str, scalar: Scalar) -> None:
        if name in ("step", "time"):
            raise ValueError(f"a metric cannot be called {name!r}: metrics.jsonl uses that key for itself")
        before = self.scalars.get(name)
        if before is None:
            self.scalars[name] = scalar
        elif before.description != scalar.description:
            raise ValueError(f"metric {name}: {scalar.description} cannot be merged with {before.description}")
        else:
            self.scalars[name] = before.merged(scalar)


class MetricsWriter:
    """Writes each step's values to ``metrics.jsonl`` (one flushed line) and ``tensorboard/``, and hands them on.

    ``resume_after`` is the last step that the loaded checkpoint knows: later steps are dropped from metrics.jsonl and
    episodes.jsonl and hidden in TensorBoard, so the curve continues as if the run had never stopped. None starts anew.
    ``listeners`` get ``(step, values)``, the same numbers. A value that is not finite is null in the JSON lines.
    """

    def __init__(
        self,
        run: RunDirectory,
        resume_after: int | None = None,
        listeners: Iterable[Callable[[int, dict[str, float]], None]] = (),
    ) -> None:
        # Here, because importing it takes seconds and the commands that only read metrics need none of it.
        from torch.utils.tensorboard import SummaryWriter

        self._run = run
        self._listeners = list(listeners)
        self._descriptions: dict[str, str] = {}
        if resume_after is not None:
            run.keep_steps_up_to(resume_after)
            if run.metric_descriptions.exists():
                self._descriptions = read_json(run.metric_descriptions)
        purge_step = None if resume_after is None else resume_after + 1
        self._tensorboard: SummaryWriter = SummaryWriter(str(run.tensorboard), purge_step=purge_step)

    def write(self, metrics: StepMetrics) -> None:
        """Raises RunWriteError, naming the file, if the disk is full; what was written before stays valid."""
        values = metrics.values()
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"step": metrics.step, "time": round(time.time(), 3), **finite}
        append_lines(self._run.metrics, [json.dumps(record, allow_nan=False)])
        if not metrics.descriptions().items() <= self._descriptions.items():
            self._descriptions |= metrics.descriptions()
            atomic_write_text(self._run.metric_descriptions, json.dumps(self._descriptions, indent=1) + "\n")
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, metrics.step)
        self._tensorboard.flush()
        for listener in self._listeners:
            listener(metrics.step, values)

    def close(self) -> None:
        self._tensorboard.close()
