"""The report of a run: one static HTML page that needs nothing else, and curve.png. What a model wrote is untrusted: it
is escaped here, and the page's content policy forbids all but its own style and embedded images."""

import base64
import io
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib
from jinja2 import Environment, FileSystemLoader
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rl_loop.tracking.metrics import Name
from rl_loop.tracking.run_directory import (
    RunDirectory,
    RunDirectoryError,
    atomic_write_bytes,
    metric_curve,
    read_json,
    read_json_lines,
)

EPISODES_SHOWN = 8
COLOURS = ("#2f7d3e", "#2f6fde", "#d1603d")
STYLE: dict[Any, Any] = {
    "font.size": 8, "axes.titlesize": 10, "axes.titlecolor": "#1f2933", "axes.labelcolor": "#66727f",
    "xtick.labelcolor": "#66727f", "ytick.labelcolor": "#66727f", "axes.edgecolor": "#c3ccd5",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e1e6eb",
    "legend.frameon": False,
}  # fmt: skip
Records = Sequence[dict[str, Any]]


class Chart(NamedTuple):
    title: str
    metrics: tuple[tuple[str, str], ...]  # (metric name, label)
    log_scale: bool = False


OUTCOME_CURVES = (Name.REWARD, "reward"), (Name.ACCURACY, "accuracy"), (Name.HELD_OUT_ACCURACY, "held-out accuracy")
CHARTS = (
    Chart("loss", ((Name.LOSS, "loss"),)),
    Chart("tool-call rate", ((Name.TOOL_CALL_RATE, "training"), (Name.HELD_OUT_TOOL_CALL_RATE, "held out"))),
    Chart("turns", ((Name.TURNS, "training"), (Name.HELD_OUT_TURNS, "held out"))),
    Chart("sampled tokens per episode", ((Name.RESPONSE_TOKENS, "tokens"),)),
    Chart("train/rollout mismatch (nats)", ((Name.LOGPROB_GAP, "|Δ log p|"), (Name.KL, "KL")), log_scale=True),
    Chart("clip fraction", ((Name.CLIP_FRACTION, "clip fraction"),)),
    Chart("gradient norm", ((Name.GRAD_NORM, "gradient norm"),)),
    Chart("entropy (nats)", ((Name.ENTROPY, "entropy"),)),
    Chart("tokens/s", ((Name.TOKENS_PER_SECOND, "tokens/s"),)),
    Chart("seconds per step", tuple((f"seconds/{phase}", phase) for phase in ("rollout", "train", "sync"))),
)


def build_report(run_dir: Path | str) -> Path:
    """Write report.html and curve.png of a finished or running run; returns the page's path. Raises RunDirectoryError
    if the directory holds no run or an unreadable file of one."""
    run = RunDirectory(Path(run_dir))
    if not run.config.exists() and not run.metrics.exists():
        raise RunDirectoryError(f"{run.path} holds no run: neither config.yaml nor metrics.jsonl is there")
    records = read_json_lines(run.metrics)
    described = run.metric_descriptions, run.summary
    descriptions, summary = (read_json(path) if path.exists() else {} for path in described)
    outcome = draw([Chart("reward and accuracy", OUTCOME_CURVES)], records, columns=1, size=(9.0, 3.6))
    details = draw(CHARTS, records, columns=3, size=(3.6, 2.5))
    if outcome:
        atomic_write_bytes(run.curve, outcome)
    page = TEMPLATES.get_template("report_template.html").render(
        title=run.path.resolve().name,
        subtitle=subtitle(records, finished=bool(summary)),
        figures={name: value for name, value in summary.items() if isinstance(value, int | float | str)},
        curves=[base64.b64encode(png).decode() for png in (outcome, details) if png],
        episodes=spread(read_json_lines(run.episodes)),
        metrics=metric_rows(records, descriptions),
        config=run.config.read_text(errors="replace") if run.config.exists() else "config.yaml is missing",
    )
    atomic_write_bytes(run.report, page.encode(errors="replace"))
    return run.report


def visible(value: object) -> str:
    """With control characters made visible instead of interpreted."""
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in str(value))


def subtitle(records: Records, finished: bool) -> str:
    if not records:
        return "no step has ended yet"
    hours = (records[-1]["time"] - records[0]["time"]) / 3600 if "time" in records[0] else 0.0
    ended = "finished" if finished else f"not finished; last step {records[-1]['step']}"
    return f"{len(records)} steps over {hours * 60:.1f} minutes, {ended}"


def number(value: object) -> str:
    """A figure as people read it: exact integers, else four digits; anything that is no number as it is."""
    if isinstance(value, float) and math.isfinite(value):
        if value.is_integer() or abs(value) >= 1000:
            return f"{value:,.0f}"
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def metric_rows(records: Records, descriptions: dict[str, Any]) -> list[tuple[str, str, tuple[float, ...]]]:
    """(name, how it is reduced, its first, last, lowest and highest value if any is finite) of every metric."""
    rows: list[tuple[str, str, tuple[float, ...]]] = []
    for name in sorted({name for record in records for name in record} - {"step", "time"}):
        values = metric_curve(records, name)[1]
        ends = (values[0], values[-1], min(values), max(values)) if values else ()
        rows.append((name, descriptions.get(name, ""), ends))
    return rows


def draw(charts: Sequence[Chart], records: Records, columns: int, size: tuple[float, float]) -> bytes | None:
    """The charts that have data, in a grid, as a PNG; ``size`` is one chart in inches. None without any data."""
    present = [chart for chart in charts if any(metric_curve(records, name)[0] for name, _ in chart.metrics)]
    if not present:
        return None
    columns = min(columns, len(present))
    rows = math.ceil(len(present) / columns)
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), dpi=130, layout="constrained")
        for i, chart in enumerate(present):
            draw_chart(figure.add_subplot(rows, columns, i + 1), chart, records)
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def draw_chart(axes: Axes, chart: Chart, records: Records) -> None:
    curves = [(metric_curve(records, name), label) for name, label in chart.metrics]
    drawn = [(*curve, label, colour) for (curve, label), colour in zip(curves, COLOURS, strict=False) if curve[0]]
    for steps, values, label, colour in drawn:
        if len(values) >= 30 and 2 * len(values) > len(records) and not chart.log_scale:
            # A noisy per-step curve: faint as measured, bold as the mean of nine steps around.
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
            values = moving_mean(values, 4)
            label = f"{label} (mean of 9 steps)"
        marker = "o" if len(steps) < 30 else ""
        axes.plot(steps, values, color=colour, linewidth=1.8, marker=marker, markersize=3, label=label)
    if chart.log_scale and all(value > 0 for _, values, *_ in drawn for value in values):
        axes.set_yscale("log")
    axes.set_title(chart.title, loc="left")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if len(drawn) > 1:
        axes.legend()


def moving_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and up to ``reach`` values on either side; fewer, but as many left as right, near the ends."""
    near = [min(reach, i, len(values) - 1 - i) for i in range(len(values))]
    return [fmean(values[i - n : i + n + 1]) for i, n in enumerate(near)]


def spread(records: Records) -> Records:
    """EPISODES_SHOWN of them at most, evenly over the run."""
    count = min(EPISODES_SHOWN, len(records))
    return [records[i] for i in sorted({round(i * (len(records) - 1) / max(1, count - 1)) for i in range(count)})]


def runs(tokens: Records) -> list[tuple[bool, Records]]:
    """Neighbouring tokens that were all sampled, or all given."""
    return [(sampled, list(run)) for sampled, run in groupby(tokens, key=lambda token: bool(token["mask"]))]


TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, finalize=visible)
TEMPLATES.filters |= {"number": number, "runs": runs, "exp": math.exp}
