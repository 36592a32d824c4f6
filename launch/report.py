"""The report of a run: one self-contained static HTML page, and curve.png.

Sampled text is untrusted. It is escaped here, and the page's content policy allows only its own
style and embedded images.
"""

import base64
import io
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from launch.control_characters import show_control_characters
from launch.progress import format_seconds
from rl_loop.tracking.episode_reader import EpisodeReader
from rl_loop.tracking.metrics import MetricName
from rl_loop.tracking.run_directory import (
    RunDirectory,
    RunDirectoryError,
    atomic_write_bytes,
    metric_curve,
    read_json,
    read_json_lines,
)

EPISODES_SHOWN = 8
TOKENS_SHOWN = 4096
"""Tokens shown of an episode: half from its beginning, half from its end.

A page needs about 100 bytes per token, and browsers are slow with millions of tokens.
"""
COLORS = ("#2f7d3e", "#2f6fde", "#d1603d", "#8a5cc2", "#b8860b", "#0e8a8a")
DARK_COLORS = dict(
    zip(COLORS, ("#5fc174", "#7aa5f5", "#ec8a6b", "#b794e6", "#d9ad3f", "#4cc0c0"), strict=True)
) | {"#1f2933": "#e3e8ed", "#66727f": "#9aa7b4", "#c3ccd5": "#4a545e", "#e1e6eb": "#343d46"}
"""Replacements for COLORS and for the colors in STYLE if the reader's system uses a dark theme."""
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 10,
    "text.color": "#1f2933",
    "axes.titlecolor": "#1f2933",
    "axes.labelcolor": "#66727f",
    "xtick.labelcolor": "#66727f",
    "ytick.labelcolor": "#66727f",
    "xtick.color": "#c3ccd5",
    "ytick.color": "#c3ccd5",
    "axes.edgecolor": "#c3ccd5",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e1e6eb",
    "legend.frameon": False,
    "svg.fonttype": "none",
}
"""Matplotlib settings, with the colors of the page."""

MIN_SMOOTHED_VALUES = 30
"""Number of values from which a curve is smoothed. Below, every value has a marker."""
SMOOTHING_RADIUS = 4
"""Values on each side in the moving mean of a noisy curve."""
REWARD_PART = "reward/"
"""Metric prefix of a reward's components."""

Records = Sequence[dict[str, Any]]
"""Lines of a run's JSONL file."""


@dataclass(frozen=True)
class ReportChart:
    """One pair of axes in a figure."""

    title: str
    metrics: tuple[tuple[str, str], ...]
    """(metric, label) of each curve."""
    log_scale: bool = False


@dataclass(frozen=True)
class MetricCurve:
    """A metric over the steps that recorded it."""

    label: str
    color: str
    steps: Sequence[int]
    values: Sequence[float]


OUTCOME_CHART = ReportChart(
    "reward and accuracy",
    (
        (MetricName.REWARD, "reward"),
        (MetricName.ACCURACY, "accuracy"),
        (MetricName.HELD_OUT_ACCURACY, "held-out accuracy"),
    ),
)
DETAIL_CHARTS = (
    ReportChart("loss", ((MetricName.LOSS, "loss"),)),
    ReportChart(
        "tool-call rate",
        ((MetricName.TOOL_CALL_RATE, "training"), (MetricName.HELD_OUT_TOOL_CALL_RATE, "held out")),
    ),
    ReportChart("turns", ((MetricName.TURNS, "training"), (MetricName.HELD_OUT_TURNS, "held out"))),
    ReportChart("sampled tokens per episode", ((MetricName.RESPONSE_TOKENS, "tokens"),)),
    ReportChart(
        "engine-trainer mismatch (nats)",
        ((MetricName.LOG_PROB_GAP, "|Δ log p|"), (MetricName.KL, "KL")),
        log_scale=True,
    ),
    ReportChart("clip fraction", ((MetricName.CLIP_FRACTION, "clip fraction"),)),
    ReportChart("gradient norm", ((MetricName.GRAD_NORM, "gradient norm"),)),
    ReportChart("entropy (nats)", ((MetricName.ENTROPY, "entropy"),)),
    ReportChart("tokens/s", ((MetricName.TOKENS_PER_SECOND, "tokens/s"),)),
    ReportChart(
        "seconds per step",
        tuple((f"seconds/{phase}", phase) for phase in ("rollout", "train", "sync")),
    ),
)


def build_report(run_dir: Path | str) -> Path:
    """Write report.html and curve.png of a finished or running run.

    Returns:
        Path of the page.

    Raises:
        RunDirectoryError: if the directory has no run, or a file of the run is unreadable.
    """
    run = RunDirectory(Path(run_dir))
    # One of the two suffices: a damaged run is worth a report, too.
    if not run.config.exists() and not run.metrics.exists():
        raise RunDirectoryError(
            f"{run.path}: not a run, because config.yaml and metrics.jsonl are missing. "
            f"`gptoss rl CONFIG name={run.path.name}` starts one"
        )

    # Any of these files may be missing at the beginning of a run.
    records = read_json_lines(run.metrics)
    descriptions = _read_json_if_present(run.metric_descriptions)
    summary = _read_json_if_present(run.summary)
    config = "config.yaml is missing"
    if run.config.exists():
        config = run.config.read_text(errors="replace")

    # curve.png is for a README or a message. The page draws the same chart in another size.
    if outcome := draw_chart(OUTCOME_CHART, records, inches=(9.0, 3.6), file_format="png"):
        atomic_write_bytes(run.curve, outcome)

    charts = [OUTCOME_CHART, *DETAIL_CHARTS, reward_parts_chart(records)]
    images = {chart.title: draw_for_page(chart, records) for chart in charts}
    shown, recorded = select_episodes(run.episodes)
    page = TEMPLATES.get_template("report_template.html").render(
        title=run.path.resolve().name,
        subtitle=describe_progress(records, finished=bool(summary)),
        figures=summary_figures(summary),
        charts={title: image for title, image in images.items() if image},
        episodes=shown,
        recorded=recorded,
        metrics=metric_rows(records, descriptions),
        config=config,
    )
    # Sampled text may contain lone surrogates, which UTF-8 cannot encode.
    atomic_write_bytes(run.report, page.encode(errors="replace"))
    return run.report


def _read_json_if_present(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def describe_progress(records: Records, finished: bool) -> str:
    """Return the subtitle of the page: number of steps and their time."""
    if not records:
        return "no step is complete"

    # Evaluations have records, too, but no step time.
    _, seconds = metric_curve(records, MetricName.STEP_SECONDS)
    count = len(seconds) or len(records)
    steps = f"{count} step{'s' if count > 1 else ''} in {format_seconds(sum(seconds))}"
    state = "finished" if finished else f"not finished; last step {records[-1]['step']}"
    return f"{steps}, {state}"


def reward_parts_chart(records: Records) -> ReportChart:
    """Return the chart of reward components, with at most one component per color."""
    # Components can change between steps, for example with the task.
    names = {name for record in records for name in record if name.startswith(REWARD_PART)}
    parts = [(name, name.removeprefix(REWARD_PART)) for name in sorted(names)]
    # A chart with one curve has no legend.
    title = "parts of the reward" if len(parts) != 1 else f"part of the reward: {parts[0][1]}"
    return ReportChart(title, tuple(parts[: len(COLORS)]))


def format_number(value: object) -> str:
    """Format a number for people: integers in full, others with 4 digits; other values with str."""
    # bool is a subclass of int.
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float) and math.isfinite(value):
        # Four digits would cut integers and large numbers.
        if value.is_integer() or abs(value) >= 1000:
            return f"{value:,.0f}"
        return f"{value:.4g}"
    return str(value)


def metric_rows(
    records: Records,
    descriptions: dict[str, Any],
) -> list[tuple[str, str, tuple[float, ...]]]:
    """Return the table of metrics.

    Args:
        records: lines of metrics.jsonl.
        descriptions: description of each metric, such as its reduction, from metrics.describe.json.

    Returns:
        (name, reduction, values) of every metric. The values are the first, last, lowest and
        highest one; empty if the metric was never finite.
    """
    # Every metric of any step, because rare ones such as evaluations are in few records.
    names = {name for record in records for name in record} - {"step", "time"}
    rows: list[tuple[str, str, tuple[float, ...]]] = []
    for name in sorted(names):
        _, values = metric_curve(records, name)
        summary: tuple[float, ...] = ()
        if values:
            summary = (values[0], values[-1], min(values), max(values))
        rows.append((name, descriptions.get(name, ""), summary))
    return rows


def summary_figures(summary: dict[str, Any]) -> dict[str, int | float | str]:
    """Return the figures that the page shows in large type, by label.

    The whole run takes longer than its steps, whose time is in the subtitle. Its label says so.
    """
    figures: dict[str, int | float | str] = {}
    for name, value in summary.items():
        if name == "seconds":
            figures["whole run, with start and evaluations"] = format_seconds(value)
        elif isinstance(value, int | float | str):
            figures[name.replace("_", " ")] = value
    return figures


def draw_for_page(chart: ReportChart, records: Records) -> str:
    """Draw a chart as SVG, with the colors of the reader's theme.

    The size is readable on a phone, and SVG is sharp on a large screen.

    Returns:
        The image in base64; "" without data.
    """
    drawn = draw_chart(chart, records, inches=(3.8, 2.6), file_format="svg")
    if drawn is None:
        return ""

    image = drawn.decode()
    light, dark = "", ""
    for number, (by_day, by_night) in enumerate(DARK_COLORS.items()):
        image = image.replace(by_day, f"var(--c{number})")
        light += f"--c{number}: {by_day}; "
        dark += f"--c{number}: {by_night}; "
    themes = f":root {{ {light}}} @media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}"
    image = image.replace("<defs>", f"<style>{themes}</style><defs>", 1)
    return base64.b64encode(image.encode()).decode()


def draw_chart(
    chart: ReportChart, records: Records, inches: tuple[float, float], file_format: str
) -> bytes | None:
    """Draw a chart.

    Args:
        chart: chart to draw.
        records: lines of metrics.jsonl.
        inches: (width, height).
        file_format: "png" or "svg".

    Returns:
        The image; None without data.
    """
    curves = chart_curves(chart, records)
    if not curves:
        return None

    buffer = io.BytesIO()
    is_svg = file_format == "svg"
    # Restored afterwards: a process that also plots for a user keeps its own style.
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=inches, dpi=130, layout="constrained")
        draw_curves(figure.add_subplot(), chart, curves)
        # The page draws the background. Without metadata, the output is reproducible.
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if is_svg else None
        figure.savefig(buffer, format=file_format, transparent=is_svg, metadata=no_metadata)
    return buffer.getvalue()


def chart_curves(chart: ReportChart, records: Records) -> list[MetricCurve]:
    """Return the curves of a chart that have data. Each metric has a fixed color."""
    curves = []
    # Colors follow the list of metrics, so that a missing metric does not shift them.
    for (name, label), color in zip(chart.metrics, COLORS, strict=False):
        steps, values = metric_curve(records, name)
        if steps:
            curves.append(MetricCurve(label, color, steps, values))
    return curves


def draw_curves(axes: Axes, chart: ReportChart, curves: Sequence[MetricCurve]) -> None:
    """Draw the curves of one chart."""
    step_label = "step"
    for curve in curves:
        # Rare evaluations are not noise from step to step, and a log scale is for orders of
        # magnitude, so neither is smoothed.
        # Fewer than every second step has a value.
        is_sparse = 2 * len(curve.steps) <= curve.steps[-1] - curve.steps[0] + 1
        if len(curve.values) >= MIN_SMOOTHED_VALUES and not is_sparse and not chart.log_scale:
            draw_smoothed(axes, curve)
            step_label = f"step (bold: mean of up to {2 * SMOOTHING_RADIUS + 1})"
        else:
            marker = "o" if len(curve.steps) < MIN_SMOOTHED_VALUES or is_sparse else ""
            axes.plot(
                curve.steps,
                curve.values,
                color=curve.color,
                linewidth=1.8,
                marker=marker,
                markersize=3,
                label=curve.label,
            )

    # A log scale cannot show zeros, such as the gap of an engine that computes the same bits.
    if chart.log_scale and all(value > 0 for curve in curves for value in curve.values):
        axes.set_yscale("log")
    axes.set_title(chart.title, loc="left")
    axes.set_xlabel(step_label)
    # Steps are integers.
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if len(curves) > 1:
        axes.legend()


def draw_smoothed(axes: Axes, curve: MetricCurve) -> None:
    """Draw the values of a noisy curve faintly, and their moving mean in bold."""
    axes.plot(curve.steps, curve.values, color=curve.color, alpha=0.25, linewidth=1)
    axes.plot(
        curve.steps,
        moving_mean(curve.steps, curve.values, SMOOTHING_RADIUS),
        color=curve.color,
        linewidth=1.8,
        label=curve.label,
    )


def moving_mean(steps: Sequence[int], values: Sequence[float], radius: int) -> list[float]:
    """Return the centered moving mean of a curve.

    Each mean has equally many values before and after its step, and fewer near the ends and near
    gaps. Therefore straight lines stay straight.

    Args:
        steps: step of each value, increasing.
        values: values of the curve.
        radius: maximum distance in steps.
    """
    means = []
    for i, step in enumerate(steps):
        before = i - bisect_left(steps, step - radius)
        after = bisect_right(steps, step + radius) - 1 - i
        near = min(before, after)
        means.append(fmean(values[i - near : i + near + 1]))
    return means


def select_episodes(directory: Path) -> tuple[list[dict[str, Any]], int]:
    """Read recorded episodes, evenly spaced over the run.

    Returns:
        At most EPISODES_SHOWN episodes, as from ``EpisodeReader.read`` with ``shown_turns``, and
        the number of recorded episodes.
    """
    reader = EpisodeReader(directory)
    reader.refresh()
    ids = reader.summary_table.column("id").to_pylist()
    count = min(EPISODES_SHOWN, len(ids))

    # Always include the first and the last one, where a run differs most.
    chosen = set(range(count))
    if count > 1:
        chosen = {round(i * (len(ids) - 1) / (count - 1)) for i in range(count)}
    episodes = []
    for i in sorted(chosen):
        episode = reader.read(ids[i])
        if episode is not None:
            episodes.append(episode | {"shown_turns": shown_turns(episode)})
    return episodes, len(ids)


@dataclass(frozen=True)
class ShownTurn:
    """The shown part of a turn."""

    role: str
    before: list[dict[str, Any]]
    """First tokens, each with text, mask and log-prob."""
    left_out: int
    """Number of tokens left out between ``before`` and ``after``."""
    after: list[dict[str, Any]]
    """Last tokens, each with text, mask and log-prob."""


def shown_turns(episode: dict[str, Any]) -> list[ShownTurn]:
    """Return the turns of an episode, without the middle tokens of a long episode."""
    tokens = len(episode["texts"])
    end_of_beginning = begin_of_end = tokens
    if tokens > TOKENS_SHOWN:
        end_of_beginning = TOKENS_SHOWN // 2
        begin_of_end = tokens - TOKENS_SHOWN // 2

    turns = []
    for turn in episode["turns"] or [{"role": "prompt", "start": 0, "end": tokens}]:
        start, end = turn["start"], turn["end"]
        # The cut is the intersection of this turn with the omitted range in the middle.
        cut_from = min(max(start, end_of_beginning), end)
        cut_to = max(min(end, begin_of_end), cut_from)
        before = episode_tokens(episode, start, cut_from)
        after = episode_tokens(episode, cut_to, end)
        turns.append(ShownTurn(turn["role"], before, cut_to - cut_from, after))
    return turns


def episode_tokens(episode: dict[str, Any], start: int, end: int) -> list[dict[str, Any]]:
    """Return text, mask and log-prob of each token in [start, end)."""
    names = ("texts", "loss_mask", "rollout_log_probs")
    columns = (episode[name][start:end] for name in names)
    return [
        {"text": text, "mask": mask, "log_prob": log_prob}
        for text, mask, log_prob in zip(*columns, strict=True)
    ]


def group_by_mask(tokens: Records) -> list[tuple[bool, Records]]:
    """Group adjacent tokens into (sampled, tokens)."""
    groups = groupby(tokens, key=lambda token: bool(token["mask"]))
    return [(sampled, list(group)) for sampled, group in groups]


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    # Applied to every value that a template inserts.
    finalize=show_control_characters,
)
TEMPLATES.filters |= {"number": format_number, "group_by_mask": group_by_mask, "exp": math.exp}
