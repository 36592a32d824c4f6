"""The viewer in Chromium: two widths, both themes, no errors, foreign requests or a11y violations.

One of these tests takes the picture of the README from a run of the demo (CONTRIBUTING.md):

    make demo
    GPTOSS_PICTURES=runs/tiny_retool make test-browser BROWSER_TESTS=picture_of
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from launch.report import build_report
from rl_loop.tracking.episode_files import list_files
from rl_loop.tracking.episode_recorder import EpisodeRecorder
from rl_loop.tracking.metrics import MetricName
from tests.support.launch.viewer.browser import THEMES, WIDTHS, barriers, fits, opened, until
from tests.support.launch.viewer.served import ExampleRun, Served, served
from tests.support.recorded_episodes import VOCABULARY, groups_of_step, train_split

pytestmark = pytest.mark.browser

DOCUMENTED_PICTURES = Path(__file__).parents[3] / "docs" / "images"


def newest_episode(viewer: Served) -> int:
    (row,) = viewer.get("/api/runs/growing/episodes?limit=1").json["rows"]
    return int(row["id"])


VIEWS = {
    "curves": ("#/curves?runs=growing,ended", ".chart canvas"),
    "episodes": ("#/episodes?run=growing", ".episodes tbody tr"),
    "conversation": ("#/episode?run=growing&id={id}", ".message.final"),
    "tokens": ("#/episode?run=growing&id={id}&view=tokens&color=gap", ".token.less"),
    "group": ("#/group?run=growing&step=3&split=train&group=1", ".siblings article"),
    "config": ("#/config?run=ended", "dd"),
    "differences": ("#/config?runs=growing,ended", ".differences"),
}


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_legible_at_any_width(
    chromium: Any, viewer: Served, view: str, width: int, theme: str, tmp_path: Path
) -> None:
    path, shown = VIEWS[view]
    path = path.format(id=newest_episode(viewer))
    with opened(chromium, viewer, path, width, theme) as page:
        page.wait_for_selector(shown)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        first, *_ = map(int, re.findall(r"\d+", background))
        assert (first > 128) == (theme == "light")
        assert fits(page)
        assert barriers(page) == []
        page.screenshot(path=tmp_path / f"{view}-{width}-{theme}.png", full_page=True)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_is_legible_at_any_width(
    chromium: Any, run: ExampleRun, width: int, theme: str
) -> None:
    report = build_report(run.directory.path)
    context = chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme=theme, bypass_csp=True
    )
    page = context.new_page()
    page.goto(report.as_uri())
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    first, *_ = map(int, re.findall(r"\d+", background))
    assert (first > 128) == (theme == "light")
    assert fits(page)
    assert barriers(page) == []

    # Charts are large enough for readable text, and they have the colors of the page.
    sizes = page.eval_on_selector_all(
        ".charts img", "images => images.map(image => image.clientWidth / image.naturalWidth)"
    )
    assert len(sizes) >= 5 and min(sizes) > 0.85
    chart = Image.open(io.BytesIO(page.locator(".charts img").first.screenshot())).convert("L")
    darkest, lightest = chart.getextrema()
    is_dark = np.median(np.asarray(chart)) < 128
    assert is_dark == (theme == "dark")
    assert lightest - darkest > 150
    context.close()


LARGEST_PICTURE = 150_000
"""Maximum bytes of a picture, because every clone of the project contains it."""


@pytest.mark.parametrize("theme", THEMES)
def test_picture_of_the_readme(chromium: Any, run: ExampleRun, theme: str, tmp_path: Path) -> None:
    """The picture shows a trained episode.

    With GPTOSS_PICTURES, it shows a rewarded episode of that run and replaces the README's picture.
    """
    directory, folder, best = run.directory.path, tmp_path, ""
    if chosen := os.environ.get("GPTOSS_PICTURES"):
        directory, folder, best = Path(chosen), DOCUMENTED_PICTURES, "&reward_from=1"
    with served(directory) as server:
        which = f"tools=calls&split=train&sort=advantage&limit=1{best}"
        query = f"/api/runs/{directory.name}/episodes?{which}"
        (row,) = server.get(query).json["rows"]
        path = f"#/episode?run={directory.name}&id={row['id']}"
        with opened(chromium, server, path, width=1000, theme=theme, height=640) as page:
            page.wait_for_selector(".message.final")
            file = folder / f"viewer_episode_{theme}.png"
            page.screenshot(path=file)
    assert 10_000 < file.stat().st_size < LARGEST_PICTURE


def test_the_readme_shows_pictures_of_both_themes() -> None:
    readme = (DOCUMENTED_PICTURES.parents[1] / "README.md").read_text()
    for theme in THEMES:
        picture = DOCUMENTED_PICTURES / f"viewer_episode_{theme}.png"
        assert f"docs/images/{picture.name}" in readme
        assert picture.stat().st_size < LARGEST_PICTURE


def test_curve_grows_while_the_run_continues(
    chromium: Any, run_viewer: Served, run: ExampleRun
) -> None:
    with opened(chromium, run_viewer, "#/curves?runs=growing") as page:
        page.wait_for_selector(".chart canvas")
        reward = page.locator(".chart", has_text="reward").first
        before = reward.locator(".legend").inner_text()
        assert "-0.05" in before  # of step 19
        run.add(5)
        until(
            page,
            "document.querySelector('.run-card').innerText.includes('step 25 of 100')",
        )
        until(
            page, "before => document.querySelector('.chart .legend').innerText !== before", before
        )
        assert "0.2" in reward.locator(".legend").inner_text()


def test_two_runs_are_compared(chromium: Any, viewer: Served) -> None:
    with opened(chromium, viewer, "#/curves?runs=growing") as page:
        page.wait_for_selector(".chart canvas")
        assert page.locator(".chart .legend").first.locator(".line").count() == 1
        page.get_by_role("checkbox", name="ended").click()
        until(page, "document.querySelectorAll('.chart .legend')[0].children.length === 2")
        assert "runs=growing%2Cended" in page.url


def test_charts_zoom_together_and_smoothing_keeps_the_scale(chromium: Any, viewer: Served) -> None:
    with opened(chromium, viewer, "#/curves?runs=growing") as page:
        page.wait_for_selector(".chart canvas")
        over = page.locator(".u-over").first.bounding_box()
        middle = over["y"] + over["height"] / 2
        page.mouse.move(over["x"] + over["width"] * 0.25, middle)
        page.mouse.down()
        page.mouse.move(over["x"] + over["width"] * 0.75, middle, steps=5)
        page.mouse.up()
        assert 3 <= int(page.get_by_label("From step").input_value()) <= 6
        assert 13 <= int(page.get_by_label("to step").input_value()) <= 16
        page.get_by_role("button", name="Whole run").click()
        assert page.get_by_label("From step").input_value() == ""
        page.get_by_label("Metric").fill("entropy")
        until(page, "document.querySelectorAll('.chart:not([hidden])').length === 1")


def test_episodes_can_be_filtered_opened_and_colored(chromium: Any, viewer: Served) -> None:
    with opened(chromium, viewer, "#/episodes?run=growing") as page:
        page.wait_for_selector(".episodes tbody tr")
        assert page.get_by_role("status").last.inner_text() == "80 of 80 episodes"
        page.get_by_label("Text in the episode").fill("answer is 5")
        until(
            page, "document.querySelector('main [role=status]').innerText === '40 of 80 episodes'"
        )
        page.get_by_label("From step").fill("19")
        until(page, "document.querySelector('main [role=status]').innerText === '4 of 80 episodes'")
        page.locator(".episodes tbody tr").nth(1).click()
        page.wait_for_selector(".message.final")
        assert page.locator(".message").count() == 4
        outcome = page.locator(".outcome").inner_text()
        assert "reward -1" in outcome and "answer 5" in outcome and "expected 4" in outcome

        page.get_by_role("button", name="Tokens", exact=True).click()
        assert page.locator(".token.more").count() > 0
        page.get_by_label("Color").select_option("advantage")
        assert page.locator(".token.less").count() > 0
        assert page.locator(".token.more").count() == 0
        page.get_by_text("print(", exact=True).click()
        details = page.locator(".details").inner_text()
        assert "log-prob, engine\n-0.125" in details
        assert "log-prob, trainer\n-0.375" in details
        assert "gap\n-0.25" in details

        page.get_by_role("link", name="All episodes").click()
        page.wait_for_selector(".episodes tbody tr")
        assert page.get_by_label("From step").input_value() == "19"


def test_model_output_is_text_on_every_page(
    chromium: Any, run_viewer: Served, run: ExampleRun
) -> None:
    (four,), (markup,) = VOCABULARY.encode("4"), VOCABULARY.encode("<i>bold</i>")
    group = groups_of_step(21, tasks=1)[0]
    for episode in group.trajectories:
        episode.token_ids = np.where(episode.token_ids == four, markup, episode.token_ids)
        episode.task_id = episode.answer = "<i>name</i>"
    with EpisodeRecorder(run.directory.episodes, VOCABULARY, "all") as recorder:
        recorder.record(21, [train_split([group])])

    episode_id = newest_episode(run_viewer) - 1
    views = {
        "#/episodes?run=growing": "<i>name</i>",
        f"#/episode?run=growing&id={episode_id}": "The answer is <i>bold</i>",
        f"#/episode?run=growing&id={episode_id}&view=tokens": "<i>bold</i>",
        "#/group?run=growing&step=21&split=train&group=0": "The answer is <i>bold</i>",
    }
    for path, text in views.items():
        with opened(chromium, run_viewer, path) as page:
            page.get_by_text(text).first.wait_for()
            assert page.locator("main i").count() == 0


def test_viewer_is_usable_by_keyboard(chromium: Any, viewer: Served) -> None:
    with opened(chromium, viewer) as page:
        page.wait_for_selector(".chart canvas")
        page.keyboard.press("2")
        page.wait_for_selector(".episodes tbody tr")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.final")
        first = page.url
        page.keyboard.press("j")
        until(page, "before => location.href !== before", first)
        page.wait_for_selector(".message.final")
        page.keyboard.press("t")
        page.wait_for_selector(".tokens")
        page.keyboard.press("c")
        assert "color=" in page.url
        page.keyboard.press("ArrowRight")
        assert page.locator(".token.chosen").count() == 1
        page.keyboard.press("g")
        page.wait_for_selector(".siblings article")
        assert page.locator(".siblings article").count() == 2
        page.keyboard.press("?")
        assert page.locator("dialog[open]").count() == 1
        page.keyboard.press("Escape")
        assert page.locator("dialog[open]").count() == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_problems_of_a_run_are_visible_on_first_page(
    chromium: Any, run_viewer: Served, run: ExampleRun, width: int
) -> None:
    run.add(1, grad_norm=float("nan"))
    with opened(chromium, run_viewer, "#/curves?runs=growing", width) as page:
        page.wait_for_selector(".run-card")
        card = page.locator(".run-card").inner_text()
        assert "Failed: numbers are finite. step 21: NaN or infinity in grad_norm" in card
        # The list shows the problems of the other runs. It is folded on a narrow screen.
        assert "1 with failed checks" in page.locator("#rail summary").inner_text()
        wrong = page.locator(".run", has_text="growing")
        right = page.locator(".run", has_text="ended")
        assert "failed: numbers are finite" in wrong.text_content()
        assert "failed" not in right.text_content()
        color = "(node) => getComputedStyle(node).borderLeftColor"
        assert wrong.evaluate(color) != right.evaluate(color)
        assert fits(page)
        assert barriers(page) == []


def test_answer_has_the_color_of_its_reward(chromium: Any, viewer: Served) -> None:
    colors = []
    for reward in ("reward_from=1", "reward_to=-1"):
        (row,) = viewer.get(f"/api/runs/growing/episodes?limit=1&{reward}").json["rows"]
        with opened(chromium, viewer, f"#/episode?run=growing&id={row['id']}") as page:
            answer = page.locator(".message.final.sampled")
            colors.append(answer.evaluate("(node) => getComputedStyle(node).backgroundColor"))
            red, green, _ = map(int, re.findall(r"\d+", colors[-1])[:3])
            assert (green > red) == (row["reward"] > 0)
            assert barriers(page) == []
    assert colors[0] != colors[1]


def test_viewer_shows_damaged_files_and_unnamed_tasks(
    chromium: Any, run_viewer: Served, run: ExampleRun
) -> None:
    group = groups_of_step(21, tasks=1)[0]
    for episode in group.trajectories:
        episode.task_id = ""
    with EpisodeRecorder(run.directory.episodes, VOCABULARY, "all") as recorder:
        recorder.record(21, [train_split([group])])
    damaged = list_files(run.directory.episodes)[3].path
    damaged.write_bytes(b"PAR1")
    with opened(chromium, run_viewer, "#/episodes?run=growing") as page:
        page.wait_for_selector(".episodes tbody tr")
        assert f"Left out: {damaged} is damaged" in page.locator(".finding.bad").inner_text()
        assert page.locator(".episodes tbody tr").count() == 50
        assert barriers(page) == []
        page.get_by_role("link", name="without a name").first.click()
        page.wait_for_selector(".message.final")
        assert page.locator("h1").inner_text() == "Task without a name"


def test_a_logarithmic_axis_has_few_marks(chromium: Any, viewer: Served) -> None:
    with opened(chromium, viewer) as page:
        page.wait_for_selector(".chart canvas")
        marks = (
            "([min, max]) => import('/static/chart.js').then((chart) => chart.logTicks(min, max))"
        )
        assert page.evaluate(marks, [1.2e-13, 4e-7]) == [1e-11, 1e-9, 1e-7]
        assert page.evaluate(marks, [0.03, 0.6]) == [0.05, 0.1, 0.2, 0.5]


def test_the_theme_is_chosen_and_kept(chromium: Any, viewer: Served) -> None:
    with opened(chromium, viewer, theme="light") as page:
        page.wait_for_selector(".chart canvas")
        button = page.get_by_role("button", name="Theme")
        button.click()
        button.click()
        assert button.inner_text() == "Theme: dark"
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.wait_for_selector(".chart canvas")


# ---- curves

KEEP_CHARTS = """
window.charts = [];
let plain;
Object.defineProperty(window, "uPlot", {
  get: () => plain && new Proxy(plain, {
    construct(target, values) {
      const chart = new target(...values);
      window.charts.push(chart);
      return chart;
    },
  }),
  set(value) { plain = value; },
});
"""
"""Script that collects the charts of a page, so that tests can read their data."""


@pytest.mark.parametrize("reach", [4, 30])
def test_sparse_curve_is_drawn_through_its_values(
    reach: int, chromium: Any, tmp_path: Path
) -> None:
    """The mean of three must not replace a value: 0.867 after step 20 would be drawn at 0.685."""
    measured = {0: 0.336, 20: 0.867, 40: 0.852, 60: 0.891}
    run = ExampleRun(tmp_path / "runs" / "evaluated", steps=0)
    for done in range(80):
        if done in measured:
            run.evaluate(**{MetricName.HELD_OUT_ACCURACY: measured[done]})
        run.add(1, **{MetricName.ACCURACY: done % 2})
    run.close()
    with served(tmp_path / "runs") as viewer, opened(chromium, viewer) as page:
        page.context.add_init_script(KEEP_CHARTS)
        page.evaluate("(reach) => localStorage.setItem('smoothing', reach)", reach)
        page.reload()
        until(page, "window.charts?.some((chart) => chart.series.length > 1)")
        (chart,) = page.evaluate(
            """() => window.charts
                .filter((chart) => chart.series.some((one) => one.label === "held-out accuracy"))
                .map((chart) => ({
                  steps: chart.data[0],
                  lines: chart.series.map((one, i) => [one.label, [...chart.data[i]]]),
                }))"""
        )
    held_out = [values for label, values in chart["lines"] if label == "held-out accuracy"]
    assert len(held_out) == 1, "no faint line beside a bold one that differs from it"
    drawn = {
        step: value
        for step, value in zip(chart["steps"], held_out[0], strict=True)
        if value is not None
    }
    assert drawn == measured
    faint, bold = (values for label, values in chart["lines"] if label == "accuracy")
    assert faint[1:] == [0, 1] * 40
    assert all(0.4 < value < 0.6 for value in bold[10:70]), "a metric of every step is smoothed"


def test_run_without_episodes_has_no_empty_table(chromium: Any, tmp_path: Path) -> None:
    ExampleRun(tmp_path / "runs" / "supervised").close()
    with served(tmp_path / "runs") as viewer, opened(chromium, viewer) as page:
        until(page, "document.querySelector('.run-card')")
        assert "Episodes" not in page.locator(".run-card").inner_text()
        page.goto(viewer.address + "#/episodes?run=supervised")
        until(page, "document.body.innerText.includes('No episodes are recorded')")
        assert page.locator("table").count() == 0
