"""The report of a run: one static HTML page that needs nothing else, and curve.png. What a model wrote is untrusted: it
is escaped here, and the page's content policy forbids all but its own style and embedded images."""

import base64
import io
import math
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rl_loop.metrics import Name
from rl_loop.run_directory import (
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
TEMPLATE = Path(__file__).with_name("report_template.html")

Records = Sequence[dict[str, Any]]


class Chart(NamedTuple):
    title: str
    metrics: tuple[tuple[str, str], ...]  # (metric name, label)
    log_scale: bool = False


OUTCOME_CURVES = (Name.REWARD, "reward"), (Name.ACCURACY, "accuracy"), (Name.HELD_OUT_ACCURACY, "held-out accuracy")
OUTCOME = Chart("reward and accuracy", OUTCOME_CURVES)
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
    outcome = draw([OUTCOME], records, columns=1, size=(9.0, 3.6))
    details = draw(CHARTS, records, columns=3, size=(3.6, 2.5))
    if outcome:
        atomic_write_bytes(run.curve, outcome)
    page = Template(TEMPLATE.read_text()).substitute(
        title=clean(run.path.resolve().name),
        subtitle=clean(subtitle(records, finished=bool(summary))),
        figures=figures_html(summary),
        curves="".join(image_html(png) for png in (outcome, details) if png)
        or "<p class='soft'>No step has ended yet.</p>",
        episodes=episodes_html(read_json_lines(run.episodes)),
        metrics=metrics_html(records, descriptions),
        config=clean(run.config.read_text(errors="replace") if run.config.exists() else "config.yaml is missing"),
    )
    atomic_write_bytes(run.report, page.encode(errors="replace"))
    return run.report


def clean(text: object) -> str:
    """Escaped for HTML text and attributes, with control characters made visible instead of interpreted."""
    visible = "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in str(text))
    return escape(visible, quote=True)


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


def figures_html(figures: dict[str, Any]) -> str:
    return "".join(
        f"<div class='figure'><b>{clean(number(value))}</b><span>{clean(name.replace('_', ' '))}</span></div>"
        for name, value in figures.items()
        if isinstance(value, int | float | str)
    )


def metrics_html(records: Records, descriptions: dict[str, Any]) -> str:
    names = sorted({name for record in records for name in record} - {"step", "time"})
    rows = []
    for name in names:
        values = metric_curve(records, name)[1]
        if values:
            columns = (values[0], values[-1], min(values), max(values))
            cells = "".join(f"<td class='number'>{clean(number(value))}</td>" for value in columns)
        else:
            cells = "<td class='number soft' colspan='4'>never finite</td>"
        rows.append(f"<tr><td>{clean(name)}</td><td class='soft'>{clean(descriptions.get(name, ''))}</td>{cells}</tr>")
    if not rows:
        return "<span class='soft'>none yet</span>"
    heads = "".join(f"<th class='number'>{head}</th>" for head in ("first", "last", "lowest", "highest"))
    return f"<table><tr><th>metric</th><th>reduced by</th>{heads}</tr>{''.join(rows)}</table>"


def image_html(png: bytes) -> str:
    image = f"<img alt='curves over steps' src='data:image/png;base64,{base64.b64encode(png).decode()}'>"
    return f"<div class='card' style='margin-bottom: 12px'>{image}</div>"


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


def episodes_html(records: Records) -> str:
    """A few episodes spread evenly over the run; the first and the last one are open."""
    if not records:
        return "<p class='soft'>No episode was recorded.</p>"
    count = min(EPISODES_SHOWN, len(records))
    chosen = sorted({round(i * (len(records) - 1) / max(1, count - 1)) for i in range(count)})
    return "".join(episode_html(records[i], opened=i in (chosen[0], chosen[-1])) for i in chosen)


def episode_html(record: dict[str, Any], opened: bool) -> str:
    reward = float(record["reward"])
    parts = ", ".join(f"{name} {number(value)}" for name, value in record["reward_parts"].items())
    pills = [f"<span class='pill {'good' if reward > 0 else 'bad'}'>reward {clean(number(reward))}</span>"]
    plain = (parts, record["finish_reason"], f"tool calls {record['tool_calls']}, failed {record['tool_errors']}")
    pills += [f"<span class='pill'>{clean(text)}</span>" for text in plain if text]
    head = f"<b>step {clean(record['step'])}</b> · {clean(record['split'])} · {clean(record['task_id'])}"
    tokens = record["tokens"]
    turns = ""
    for turn in record["turns"] or [{"role": "prompt", "start": 0, "end": len(tokens)}]:
        role, text = clean(turn["role"]), tokens_html(tokens[turn["start"] : turn["end"]])
        turns += f"<div class='turn {role}'><div class='role'>{role}</div><pre>{text}</pre></div>"
    summary = f"<summary>{head}{''.join(pills)}</summary>"
    return f"<details{' open' if opened else ''}>{summary}<div class='turns'>{turns}</div></details>"


def tokens_html(tokens: Records) -> str:
    """One span per sampled token with its log-probs as tooltip; given tokens run together in one span."""
    pieces: list[str] = []
    for sampled, run in groupby(tokens, key=lambda token: bool(token["mask"])):
        if not sampled:
            pieces.append(f"<span class='g'>{clean(''.join(token['text'] for token in run))}</span>")
            continue
        for token in run:
            tooltip = f"log p rollout {token['logprob']:.4f} (p {math.exp(token['logprob']):.3f})"
            pieces.append(f"<span class='s' title='{clean(tooltip)}'>{clean(token['text'])}</span>")
    return "".join(pieces)
