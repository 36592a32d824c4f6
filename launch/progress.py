"""What a person sees while a run goes: one live panel on a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_loop.metrics import Name

BARS = "▁▂▃▄▅▆▇█"


class Field(NamedTuple):
    """One shown metric: its label and how a value is written."""

    label: str
    metric: str
    form: str


# In reading order; a field appears once its metric has been seen. The first one present gets the sparkline.
FIELDS = (
    Field("reward", Name.REWARD, "{:.3f}"),
    Field("loss", Name.LOSS, "{:.4f}"),
    Field("accuracy", Name.ACCURACY, "{:.3f}"),
    Field("held out", Name.HELD_OUT_ACCURACY, "{:.3f}"),
    Field("tool calls", Name.TOOL_CALL_RATE, "{:.2f}"),
    Field("turns", Name.TURNS, "{:.2f}"),
    Field("tokens/s", Name.TOKENS_PER_SECOND, "{:,.0f}"),
    Field("|Δlogp|", Name.LOGPROB_GAP, "{:.1e}"),
    Field("clipped", Name.CLIP_FRACTION, "{:.3f}"),
    Field("grad norm", Name.GRAD_NORM, "{:.2f}"),
)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as bars between their own minimum and maximum; a value that is not finite is a gap."""
    shown = list(values)[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return " " * len(shown)
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    top = len(BARS) - 1
    return "".join(BARS[round((v - low) / span * top)] if math.isfinite(v) else " " for v in shown)


def clock(seconds: float) -> str:
    """61 -> "1:01", 3661 -> "1:01:01"."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class TrainingProgress:
    """A context manager. Give ``step`` to ``MetricsWriter`` as a listener and call ``phase`` as the loop moves on.

    ``total_steps`` steps are numbered 0 .. total_steps - 1; a resumed run begins at ``first_step``.
    """

    def __init__(self, title: str, total_steps: int, first_step: int = 0, console: Console | None = None) -> None:
        self._title = title
        self._total = total_steps
        self._done = first_step
        self._console = console or Console()
        self._phase = ""
        self._phase_began = self._began = self._step_ended = time.monotonic()
        self._step_seconds: deque[float] = deque(
            maxlen=10
        )  # recent ones: episodes change in length as the policy learns
        self._latest: dict[str, float] = {}
        self._history: dict[str, list[float]] = {}
        self._live: Live | None = None

    def __enter__(self) -> TrainingProgress:
        self._phase_began = self._began = self._step_ended = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._phase = "done" if kind is None else "stopped"
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """What the loop does now: "rollout", "train", "sync", "evaluate", "save"."""
        self._phase, self._phase_began = name, time.monotonic()

    def note(self, message: str) -> None:
        """One line that stays, above the panel."""
        self._console.print(escape(message), highlight=False, soft_wrap=True)

    def step(self, step: int, values: dict[str, float]) -> None:
        """Step number ``step`` (from 0) has ended with these metrics."""
        now = time.monotonic()
        self._step_seconds.append(now - self._step_ended)
        self._step_ended = now
        self._done = min(step + 1, self._total)  # an evaluation after the last step is no further step
        self._latest |= values
        for name, value in values.items():
            self._history.setdefault(name, []).append(value)
        if self._live is None:
            self._console.print(self._line(values), highlight=False, markup=False, soft_wrap=True)

    @property
    def seconds_left(self) -> float | None:
        """From the recent steps; None before the first one ends."""
        if not self._step_seconds:
            return None
        return sum(self._step_seconds) / len(self._step_seconds) * (self._total - self._done)

    def _seen(self) -> list[Field]:
        return [field for field in FIELDS if field.metric in self._latest]

    def _line(self, values: dict[str, float]) -> str:
        parts = [
            f"{field.label} {field.form.format(values[field.metric])}" for field in FIELDS if field.metric in values
        ]
        return "  ".join([f"step {self._done}/{self._total}", *parts, f"left {clock(self.seconds_left or 0.0)}"])

    def _panel(self) -> RenderableType:
        now = time.monotonic()
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        activity = (
            f"{self._phase} {clock(now - self._phase_began)}"
            if self._phase not in ("", "done", "stopped")
            else self._phase
        )
        head.add_row(
            Text(f"step {self._done}/{self._total}", style="bold"),
            ProgressBar(total=max(1, self._total), completed=self._done),
            Text(activity, style="cyan"),
        )
        body: list[RenderableType] = [head]
        fields = self._seen()
        if fields:
            first = fields[0]
            bars = sparkline(self._history[first.metric], width=max(10, self._console.width - 40))
            curve = Text.assemble(
                (f"{first.label} ", "dim"), (first.form.format(self._latest[first.metric]), "bold"), "  "
            )
            body.append(curve.append(bars, style="green"))
        cells = [
            Text.assemble((f"{field.label} ", "dim"), field.form.format(self._latest[field.metric]))
            for field in fields[1:]
        ]
        if cells:
            grid = Table.grid(padding=(0, 3))
            for i in range(0, len(cells), 4):
                grid.add_row(*cells[i : i + 4])
            body.append(grid)
        left = self.seconds_left
        footer = f"elapsed {clock(now - self._began)}"
        # While a step runs its seconds count down; the estimate itself changes only when a step ends.
        footer += "" if left is None else f" · left {clock(left - (now - self._step_ended))}"
        body.append(Text(footer, style="dim"))
        return Panel(Group(*body), title=Text(self._title, style="bold"), title_align="left", border_style="dim")
