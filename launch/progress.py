"""Display of a running training, live on a terminal or one line per step, and its last line."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from statistics import fmean

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from launch.control_characters import show_control_characters
from launch.metric_labels import LABELS
from rl_loop.tracking.metrics import MetricName
from rl_loop.tracking.run_directory import RunDirectory, metric_curve, read_json, read_json_lines

METRIC_FORMATS: dict[str, str] = {
    MetricName.REWARD: "{:.3f}",
    MetricName.LOSS: "{:.4f}",
    MetricName.VALIDATION_LOSS: "{:.4f}",
    MetricName.TOOL_CALL_ACCURACY: "{:.3f}",
    MetricName.ANSWER_ACCURACY: "{:.3f}",
    MetricName.ACCURACY: "{:.3f}",
    MetricName.HELD_OUT_ACCURACY: "{:.3f}",
    MetricName.TOOL_CALL_RATE: "{:.2f}",
    MetricName.TURNS: "{:.2f}",
    MetricName.TOKENS_PER_SECOND: "{:,.0f}",
    MetricName.LOG_PROB_GAP: "{:.1e}",
    MetricName.CLIP_FRACTION: "{:.3f}",
    MetricName.GRAD_NORM: "{:.2f}",
}
"""{metric: number format} of the displayed metrics, in display order."""
RECENT_STEPS = 10
"""Steps whose mean time predicts the remaining time. Episode lengths change during training."""


def format_seconds(seconds: float) -> str:
    """Format a duration: 61 -> "1:01", 3661 -> "1:01:01"."""
    # Rounded first, so that 59.9 s is 1:00 and not 0:60.
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"


def format_metrics(values: dict[str, float]) -> str:
    """Format the metrics that are in METRIC_FORMATS, on one line."""
    shown = []
    for name, number_format in METRIC_FORMATS.items():
        if name in values:
            shown.append(f"{LABELS[name]} {number_format.format(values[name])}")
    return "  ".join(shown)


class StepDisplay(Progress):
    """Rich's progress bar above a line with the newest metrics."""

    metrics_line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.metrics_line)


class TrainingProgress:
    """Shows a training run while its context is open.

    Pass ``step`` to ``MetricsWriter`` as a listener, and call ``phase`` at each phase of the loop.
    A resumed run starts at ``first_step``.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        first_step: int = 0,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console()
        self._total = total_steps
        self._done = first_step
        self._phase = ""
        # Some metrics are not in every step. The display keeps their last value.
        self._latest: dict[str, float] = {}
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._step_ended = time.monotonic()

        self._display = StepDisplay(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("step {task.completed}/{task.total}  [cyan]{task.fields[phase]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,  # ``step`` prints lines instead
            expand=True,
        )
        self._task = self._display.add_task(
            escape(title),
            total=total_steps,
            completed=first_step,
            phase="",
            left="",
        )

    def __enter__(self) -> TrainingProgress:
        # The time to load the model does not belong to the first step.
        self._step_ended = time.monotonic()
        self._display.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The last line stays on the terminal.
        self.phase("done" if kind is None else "stopped")
        self._display.stop()

    def phase(self, name: str) -> None:
        """Show the current phase: "rollout", "update", "sync", "evaluate" or "save"."""
        self._phase = name
        self._display.update(self._task, phase=name)

    def episodes(self, ended: int, total: int) -> None:
        """Show the number of finished episodes in the current rollout.

        Calls in other phases are ignored: during training, episodes of the next step may finish.

        Args:
            ended: number of finished episodes.
            total: episodes in the rollout.
        """
        if self._phase == "rollout":
            self._display.update(self._task, phase=f"rollout {ended:,}/{total:,} episodes")

    def note(self, message: str) -> None:
        """Print a permanent line above the display."""
        shown = escape(show_control_characters(message))
        self._console.print(shown, highlight=False, soft_wrap=True)

    def step(self, step: int, values: dict[str, float]) -> None:
        """Show the metrics of a training step or of an evaluation.

        Args:
            step: number of completed steps.
            values: values of the step's metrics.
        """
        # An evaluation reports the same step again and took no training step.
        if step > self._done:
            now = time.monotonic()
            self._step_seconds.append(now - self._step_ended)
            self._step_ended = now
        self._done = step
        self._latest |= values

        left = ""
        # Right after a resume, no step has been timed.
        if self._step_seconds:
            remaining = fmean(self._step_seconds) * (self._total - self._done)
            left = f"left {format_seconds(remaining)}"
        self._display.metrics_line = format_metrics(self._latest)
        self._display.update(self._task, completed=self._done, left=left)

        if not self._console.is_terminal:
            # Only this step's values, because earlier lines of a log show the others.
            columns = [f"step {self._done}/{self._total}", format_metrics(values), left]
            line = "  ".join(column for column in columns if column)
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


COMPARED = (
    MetricName.HELD_OUT_ACCURACY,
    MetricName.HELD_OUT_REWARD,
    MetricName.LOSS,
    MetricName.VALIDATION_LOSS,
    MetricName.TOOL_CALL_ACCURACY,
    MetricName.ANSWER_ACCURACY,
)
"""Metrics whose first and last values are printed. The loss is printed only without accuracies."""


def describe_outcome(run: RunDirectory) -> str:
    """Return first and last values and the training time of a run, in one line.

    Example: "held-out accuracy 0.336 -> 0.867, held-out reward -0.328 -> 0.734 in 80 steps, 20:25".
    """
    records = read_json_lines(run.metrics)
    changes: list[str] = []
    for metric in COMPARED:
        _, values = metric_curve(records, metric)
        if metric == MetricName.LOSS and changes:
            continue
        if values:
            changes.append(f"{LABELS[metric]} {values[0]:.3f} -> {values[-1]:.3f}")

    summary = read_json(run.summary)
    seconds = sum(metric_curve(records, MetricName.STEP_SECONDS)[1])
    return f"{', '.join(changes)} in {summary['steps']} steps, {format_seconds(seconds)}"
