"""The report is a safe, self-contained page, also for an unfinished run."""

import base64
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from launch.report import (
    DETAIL_CHARTS,
    OUTCOME_CHART,
    build_report,
    describe_progress,
    draw_for_page,
    format_number,
    moving_mean,
    reward_parts_chart,
    summary_figures,
)
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup, Turn
from rl_loop.tracking.episode_recorder import EpisodeRecorder
from rl_loop.tracking.episode_table import SplitEpisodes
from rl_loop.tracking.metrics import MetricName, MetricsWriter, StepMetrics
from rl_loop.tracking.run_directory import RunDirectory, RunDirectoryError, start_run
from tests.support.recorded_episodes import Words

SVG = "data:image/svg+xml;base64,"
ATTACK = "</pre><script>alert(1)</script><img src=x onerror='alert(2)'>\" onmouseover=\"alert(3)\udc80\x00"


class Page(HTMLParser):
    """Collect tags, attributes and the text of sampled tokens. It escapes like a browser."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.spans: list[tuple[str | None, str]] = []
        self._class: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        self._class = dict(attrs).get("class") if tag == "span" else None

    def handle_data(self, data: str) -> None:
        if self._class in ("s", "g"):
            self.spans.append((self._class, data))
        self._class = None


def parse(report: Path) -> Page:
    page = Page()
    page.feed(report.read_text())
    return page


def record_episodes(run: RunDirectory, texts: list[str], steps: int = 1) -> None:
    """Record in every step a prompt token, a sampled one, a tool token and a sampled one."""
    trajectory = Trajectory(
        task_id="task <7>",
        token_ids=[0, 1, 2, 3],
        loss_mask=[0, 1, 0, 1],
        rollout_log_probs=[0.0, -0.5, 0.0, -0.25],
        turns=[
            Turn("prompt", 0, 1, ""),
            Turn("assistant", 1, 2, ""),
            Turn("tool", 2, 3, ""),
            Turn("assistant", 3, 4, ""),
        ],
        reward=1.0,
        reward_parts={"<b>correct</b>": 1.0},
        answer="6",
        expected_answer="<7>",
    )
    group = TrajectoryGroup("task <7>", [trajectory])
    with EpisodeRecorder(run.episodes, Words(texts), "all") as recorder:
        for step in range(steps):
            recorder.record(step, [SplitEpisodes("train", [group])])


def write_steps(run: RunDirectory, steps: int) -> None:
    writer = MetricsWriter(run)
    for step in range(steps):
        metrics = StepMetrics(step)
        metrics.add_mean(MetricName.REWARD, step, 4, over="sequences")
        metrics.add_mean(MetricName.LOG_PROB_GAP, 1e-6, 1, over="tokens")
        metrics.add("<i>own metric</i>", math.inf, "last")
        writer.write(metrics)
    writer.close()


def test_report_shows_the_run_and_loads_nothing(tmp_path: Path) -> None:
    run = start_run(tmp_path / "tiny", "lr: 0.001\n")
    write_steps(run, steps=3)
    record_episodes(run, ["question", "print", "4\n", "done"])
    run.write_summary(held_out_accuracy_rl=0.9375)
    report = build_report(run.path)
    page, text = parse(report), report.read_text()
    assert page.spans[-4:] == [("g", "question"), ("s", "print"), ("g", "4\n"), ("s", "done")]
    assert (
        "0.9375" in text
        and "held out accuracy rl" in text
        and "lr: 0.001" in text
        and "finished" in text
    )
    sources = [value or "" for name, value in page.attributes if name in ("src", "href")]
    assert len(sources) == 2 and all(source.startswith(SVG) for source in sources)
    assert run.curve.read_bytes().startswith(b"\x89PNG")


def test_chart_colors_have_a_dark_variant() -> None:
    records = [{"step": step, "reward": float(step), "accuracy": 0.5} for step in range(40)]
    drawn = base64.b64decode(draw_for_page(OUTCOME_CHART, records)).decode()
    style, body = drawn.split("</style><defs>")
    assert style.count("--c0: #") == 2 and "prefers-color-scheme: dark" in style
    assert re.findall(r"#[0-9a-f]{6}\b", body.replace("url(#", "")) == []
    assert "var(--c0)" in body and ">accuracy</text>" in body
    # Matplotlib omits the color attribute of black text.
    texts = re.findall(r"<text [^>]*>", body)
    assert len(texts) > 10 and all("fill: var(" in text for text in texts)


def test_a_chart_of_many_steps_is_no_larger_than_its_pixels_need() -> None:
    noise = np.random.default_rng(0).normal(size=50_000)
    records = [{"step": step, "loss": float(value)} for step, value in enumerate(noise)]
    assert len(draw_for_page(DETAIL_CHARTS[0], records)) < 400_000


def test_report_separates_time_of_run_from_time_of_steps() -> None:
    figures = summary_figures({"seconds": 861.9, "held_out_reward_rl": 0.5, "versions": {}})
    assert figures == {"whole run, with start and evaluations": "14:22", "held out reward rl": 0.5}


def test_nothing_a_model_wrote_becomes_markup(tmp_path: Path) -> None:
    run = start_run(tmp_path / "tiny", f"note: {ATTACK[:-2]}\n")
    write_steps(run, steps=1)
    record_episodes(run, [ATTACK] * 4)
    page = parse(build_report(run.path))
    assert page.tags.isdisjoint({"script", "i"}) and not any(
        name.startswith("on") for name, _ in page.attributes
    )
    # The text is still readable, and its NUL is visible.
    assert page.spans[-1] == ("s", ATTACK[:-2] + "?" + "\N{SYMBOL FOR NULL}")


def test_a_sampled_token_shows_its_log_prob(tmp_path: Path) -> None:
    run = start_run(tmp_path / "tiny", "")
    record_episodes(run, ["a", "b", "c", "d"])
    page = parse(build_report(run.path))
    assert page.spans[-3:] == [("s", "b"), ("g", "c"), ("s", "d")]
    titles = [value for name, value in page.attributes if name == "title"]
    assert titles[0] == "log p rollout -0.5000 (p 0.607)"


def test_an_episode_shows_its_answer_and_the_right_one(tmp_path: Path) -> None:
    run = start_run(tmp_path / "tiny", "")
    record_episodes(run, ["a", "b", "c", "d"])
    report = build_report(run.path).read_text()
    assert "answered 6<" in report and "expected &lt;7&gt;<" in report


def test_a_run_without_a_finished_step_has_a_report(tmp_path: Path) -> None:
    run = start_run(tmp_path / "tiny", "lr: 1\n")
    run.metrics.write_text('{"step": 0, "rewa')  # the process was killed during the write
    text = build_report(run.path).read_text()
    assert "No step is complete" in text and "No episode was recorded" in text


def test_report_of_stopped_run_shows_its_progress(tmp_path: Path) -> None:
    run = start_run(tmp_path / "tiny", "")
    write_steps(run, steps=2)
    assert "not finished; last step 1" in build_report(run.path).read_text()


def test_final_evaluation_is_not_a_step_and_adds_no_step_time() -> None:
    records = [
        {"step": step, "time": 100.0 * step, MetricName.STEP_SECONDS: 15.0} for step in range(80)
    ]
    evaluation = {"step": 80, "time": 9000.0, MetricName.HELD_OUT_ACCURACY: 0.9}
    assert describe_progress([*records, evaluation], finished=True) == "80 steps in 20:00, finished"


def test_parts_of_the_reward_are_drawn() -> None:
    records = [{"step": 0, "reward/format": 1.0, "reward/correct": 0.0, "reward": 1.0}]
    chart = reward_parts_chart(records)
    assert chart.metrics == (("reward/correct", "correct"), ("reward/format", "format"))
    assert not reward_parts_chart([]).metrics
    assert reward_parts_chart([{"reward/score": 1.0}]).title == "part of the reward: score"


def test_at_most_eight_episodes_are_shown_and_they_span_the_run(tmp_path: Path) -> None:
    run = start_run(tmp_path / "tiny", "")
    record_episodes(run, ["a", "b", "c", "d"], steps=100)
    steps = re.findall(r"<b>step (\d+)</b>", build_report(run.path).read_text())
    assert len(steps) == 8 and (steps[0], steps[-1]) == ("0", "99")


def test_report_omits_middle_of_long_episodes_and_stays_small(tmp_path: Path) -> None:
    run = start_run(tmp_path / "long", "")
    tokens = 20_000
    rng = np.random.default_rng(0)
    bounds = [0, 1_500, 2_500, 19_000, tokens]
    roles = ["prompt", "assistant", "tool", "assistant"]
    trajectory = Trajectory(
        task_id="long",
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=(np.arange(tokens) >= 1_500) & ~(np.arange(tokens) // 100 % 2 == 0),
        rollout_log_probs=-rng.random(tokens, np.float32),
        turns=[Turn(role, *ends, "") for role, ends in zip(roles, pairwise(bounds), strict=True)],
        reward=1.0,
    )
    group = TrajectoryGroup("long", [trajectory] * 4)
    words = Words([f"{number} " for number in range(tokens)])
    with EpisodeRecorder(run.episodes, words, "all") as recorder:
        for step in range(4):
            recorder.record(step, [SplitEpisodes("train", [group])])

    report = build_report(run.path)
    assert report.stat().st_size < 4_000_000
    text = report.read_text()
    assert text.count("15,452 tokens left out") == 8
    assert text.count("452 tokens left out") == 16
    shown = [
        int(word) for _, words in parse(report).spans for word in words.split() if word.isdigit()
    ]
    assert shown == 8 * [*range(2048), *range(tokens - 2048, tokens)]


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"nothing: not a run"):
        build_report(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.123456, "0.1235"),
        (3.0, "3"),
        (1234.56, "1,235"),
        (7, "7"),
        (2e-6, "2e-06"),
        (math.nan, "nan"),
        ("text", "text"),
    ],
)
def test_summary_figures_are_readable(value: object, shown: str) -> None:
    assert format_number(value) == shown


def test_the_moving_mean_keeps_a_straight_line() -> None:
    steps = range(1, 6)
    assert moving_mean(steps, [0.0, 1.0, 2.0, 3.0, 4.0], radius=2) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert moving_mean([1, 2, 3], [0.0, 3.0, 0.0], radius=1) == [0.0, 1.0, 0.0]


def test_moving_mean_keeps_values_across_a_gap() -> None:
    """The window counts steps, because a value 20 steps away belongs to another policy."""
    steps = [1, 2, 3, 23, 43]
    assert moving_mean(steps, [0.0, 3.0, 0.0, 6.0, 9.0], radius=2) == [0.0, 1.0, 0.0, 6.0, 9.0]
