"""Metrics of one step: their reduction over optimizer steps and rollout rounds, and their files.

A mean is stored as sum and count, because a mean of means is wrong for different numbers of tokens.
"""

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from rl_loop.tracking.run_directory import RunDirectory, append_lines, read_json, write_json

Listener = Callable[[int, dict[str, float]], None]


class MetricName:
    """Names of metrics that the progress display and the report use.

    Metrics with other names are written and plotted, too.
    """

    # Mean over sequences.
    REWARD = "reward"
    # Mean over sequences of the training tasks.
    ACCURACY = "accuracy"
    # Mean over sequences, on steps that evaluate.
    HELD_OUT_ACCURACY = "held_out/accuracy"
    # Mean over sequences, on steps that evaluate.
    HELD_OUT_REWARD = "held_out/reward"
    HELD_OUT_TOOL_CALL_RATE = "held_out/tool_call_rate"
    HELD_OUT_TURNS = "held_out/turns"
    # Share of sequences with at least one tool call.
    TOOL_CALL_RATE = "tool_call_rate"
    # Assistant turns, mean over sequences.
    TURNS = "turns"
    # Sampled tokens, mean over sequences.
    RESPONSE_TOKENS = "response_tokens"
    # Aggregated loss, mean over optimizer steps.
    LOSS = "loss"
    # Nats, mean over loss tokens, on steps that validate.
    VALIDATION_LOSS = "validation/loss"
    # Share of turns with the calls of the reference, on steps that sample conversations.
    TOOL_CALL_ACCURACY = "validation/tool_call_accuracy"
    # Share of turns with the text of the reference.
    ANSWER_ACCURACY = "validation/answer_accuracy"
    # |log pi_train - log pi_rollout|, mean over sampled tokens, nats.
    LOG_PROB_GAP = "mismatch/log_prob_gap_mean"
    # k3 estimate of KL(rollout || train), mean over sampled tokens, nats.
    KL = "mismatch/kl_k3"
    # KL(policy || teacher) or its k1 estimate, mean over sampled tokens, nats.
    TEACHER_KL = "distillation/teacher_kl"
    # Share of sampled tokens whose ratio was clipped.
    CLIP_FRACTION = "clip_fraction"
    # Share of tasks in which every advantage is 0.
    ZERO_ADVANTAGE_FRACTION = "rollout/zero_advantage_fraction"
    # Norm before clipping, newest value of the step.
    GRAD_NORM = "grad_norm"
    # Entropy of the sampling distribution, mean over sampled tokens, nats.
    ENTROPY = "entropy"
    # Newest value of the step.
    LEARNING_RATE = "learning_rate"
    # Tokens of the step's episodes (prompts, tool outputs and sampled tokens) per second of wall
    # time. In SFT, all tokens of the step's samples.
    TOKENS_PER_SECOND = "tokens_per_second"
    # Wall time of the step.
    STEP_SECONDS = "seconds/step"


@dataclass(frozen=True)
class MetricScalar:
    """One metric of one step, which can be merged with further parts."""

    total: float
    """Sum of a mean or sum. The value otherwise."""
    count: float
    """Divisor of a mean. 1 otherwise."""
    reduction: Literal["mean", "sum", "max", "last"]
    """Reduction of one step's parts."""
    over: str
    """Noun for one count: "tokens", "sequences" or "steps"."""

    @property
    def value(self) -> float:
        return self.total / self.count if self.reduction == "mean" else self.total

    @property
    def description(self) -> str:
        """Text such as "mean over tokens"."""
        return f"{self.reduction} over {self.over}"

    def merge(self, other: "MetricScalar") -> "MetricScalar":
        """Return this part merged with a later part of the same metric."""
        if self.reduction in ("mean", "sum"):
            return MetricScalar(
                self.total + other.total, self.count + other.count, self.reduction, self.over
            )
        if self.reduction == "last":
            return other
        # Keep NaN, because metrics must show it. In Python max(1.0, nan) is 1.0.
        return max(self, other, key=lambda part: (math.isnan(part.total), part.total))


@dataclass
class StepMetrics:
    """All metrics of one step. Adding a name again merges the parts, such as of micro-batches."""

    step: int
    """Number of completed steps. The first training step has 1."""
    scalars: dict[str, MetricScalar] = field(default_factory=dict)

    def add_mean(self, name: str, total: float, count: float, over: str) -> None:
        """Add a mean.

        Args:
            name: name of the metric.
            total: sum of the values.
            count: number of values.
            over: noun for the values, such as "tokens" or "sequences".
        """
        self._add(name, MetricScalar(float(total), float(count), "mean", over))

    def add(
        self, name: str, value: float, reduction: Literal["sum", "max", "last"], over: str = "steps"
    ) -> None:
        """Add a single value.

        Args:
            name: name of the metric.
            value: value.
            reduction: reduction over several values. Use "last", the newest one, for values that
                are equal on all ranks.
            over: noun for the values.
        """
        self._add(name, MetricScalar(float(value), 1.0, reduction, over))

    def values(self) -> dict[str, float]:
        """Return {name: reduced value}.

        A mean without values is left out. NaN and infinity are kept.
        """
        return {name: scalar.value for name, scalar in self.scalars.items() if scalar.count}

    def descriptions(self) -> dict[str, str]:
        """Return {name: description}, such as "mean over tokens"."""
        return {name: scalar.description for name, scalar in self.scalars.items()}

    def _add(self, name: str, scalar: MetricScalar) -> None:
        if name in ("step", "time"):
            raise ValueError(
                f"{name!r} is not allowed as the name of a metric, because metrics.jsonl uses "
                "this key"
            )
        before = self.scalars.get(name)
        # Merging a mean with a maximum, or tokens with sequences, would give a number without
        # meaning.
        if before and before.description != scalar.description:
            raise ValueError(
                f"metric {name} was added as {before.description} and as {scalar.description}. Use one "
                "kind for a name"
            )
        self.scalars[name] = before.merge(scalar) if before else scalar


class MetricsWriter:
    """Writes values to ``metrics.jsonl`` (flushed lines) and ``tensorboard/``, and passes them on.

    A line's step is the number of completed steps: 1 for the first training step, 0 for an
    evaluation before it. An evaluation has a separate line.

    Args:
        run: directory of the run.
        resume_after: number of steps in the loaded checkpoint. Lines of later steps are dropped
            (hidden in TensorBoard), and the curve continues. None starts a new curve.
        listeners: functions to call with (step, values) of each line. JSON has null for NaN and
            infinity.
    """

    def __init__(
        self, run: RunDirectory, resume_after: int | None = None, listeners: Iterable[Listener] = ()
    ) -> None:
        # Imported here, because the import takes seconds and commands that only read metrics do not
        # need it.
        from torch.utils.tensorboard import SummaryWriter

        self._run = run
        self._listeners = list(listeners)
        self._descriptions: dict[str, str] = {}
        if resume_after is not None:
            run.delete_steps_after(resume_after)
            if run.metric_descriptions.exists():
                self._descriptions = read_json(run.metric_descriptions)
        # TensorBoard's files cannot be shortened, but its reader can hide later steps.
        hidden_from = None if resume_after is None else resume_after + 1
        self._tensorboard: SummaryWriter = SummaryWriter(
            str(run.tensorboard), purge_step=hidden_from
        )

    def write(self, metrics: StepMetrics) -> None:
        """Write the metrics of a step.

        Raises:
            RunWriteError: if the disk is full. Earlier lines stay valid.
        """
        values = metrics.values()
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"step": metrics.step, "time": round(time.time(), 3), **finite}
        # First, because a resume reads this file. json.dumps would write NaN, which is not JSON.
        append_lines(self._run.metrics, [json.dumps(record, allow_nan=False)])
        if not metrics.descriptions().items() <= self._descriptions.items():
            self._descriptions |= metrics.descriptions()
            write_json(self._run.metric_descriptions, self._descriptions, indent=1)
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, metrics.step)
        # The writer's default is to flush every 120 s.
        self._tensorboard.flush()
        for listener in self._listeners:
            listener(metrics.step, values)

    def close(self) -> None:
        self._tensorboard.close()
