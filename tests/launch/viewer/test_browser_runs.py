"""List of runs, values at the cursor, and differences of configurations, in Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_loop.tracking.metrics import MetricName
from tests.support.launch.viewer.browser import WIDTHS, barriers, fits, opened, until
from tests.support.launch.viewer.served import ExampleRun, Served, served

pytestmark = pytest.mark.browser

CONFIG = """
name: {name}
model: {{model_type: gpt_oss, num_layers: {layers}, hidden_size: 128}}
training: {{steps: 100}}
algorithm: {{mini_batches: 1}}
optimizer: {{lr: {rate}}}
tracking: {{tags: [{tags}]}}
"""

NAMES = (
    "[...document.querySelectorAll('.rail-list .run .name')].map((link) => link.textContent.trim())"
)


def write_runs(folder: Path, count: int) -> None:
    """Write runs with tags, two model sizes, rewards that fall, and episodes of the first one."""
    for number in range(count):
        tags = "baseline, long" if number % 2 else "wide"
        config = CONFIG.format(
            name=f"run-{number}", layers=4 + number % 2, rate=0.001 * (1 + number % 3), tags=tags
        )
        episodes = 3 if number == 0 else 0
        escaped = config.replace("{", "{{").replace("}", "}}")
        run = ExampleRun(folder / f"run-{number}", config=escaped, episodes=episodes)
        run.add(3, reward=-float(number))
        run.evaluate(**{MetricName.HELD_OUT_ACCURACY: number / 100})
        run.close()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("many")
    write_runs(folder, 24)
    with served(folder) as server:
        yield server


@pytest.mark.parametrize("width", WIDTHS)
def test_first_chart_is_on_first_screen_of_24_runs(chromium: Any, many: Served, width: int) -> None:
    six = ",".join(f"run-{number}" for number in range(6))
    with opened(chromium, many, f"#/curves?runs={six}", width) as page:
        page.wait_for_selector(".chart canvas")
        assert page.locator(".run").count() == 24
        assert page.locator(".chart").first.bounding_box()["y"] < 750
        if width < 900:
            page.locator("#rail summary").first.click()
            assert page.locator(".rail-list").bounding_box()["height"] <= 450
        assert fits(page)
        assert barriers(page) == []


def test_runs_can_be_found_sorted_grouped_and_chosen(chromium: Any, many: Served) -> None:
    with opened(chromium, many, "#/curves?runs=run-0") as page:
        page.wait_for_selector(".chart canvas")
        page.get_by_label("Sort").select_option("reward")
        assert page.evaluate(NAMES)[:3] == ["run-0", "run-1", "run-2"]
        page.get_by_label("Sort").select_option("held_out")
        assert page.evaluate(NAMES)[:2] == ["run-23", "run-22"]

        page.get_by_label("Group").select_option("tag")
        groups = page.locator(".rail-group").all_inner_texts()
        assert groups == ["baseline (12)", "long (12)", "wide (12)"]
        page.get_by_label("Group").select_option("model")
        assert page.locator(".rail-group").all_inner_texts() == [
            "gpt_oss 4x128 (12)",
            "gpt_oss 5x128 (12)",
        ]

        # All words must occur, in any of name, kind, state, model, data and tags.
        page.keyboard.press("Escape")
        page.get_by_label("Find a run").fill("LONG run-1")
        assert page.evaluate(NAMES) == [f"run-{i}" for i in (19, 17, 15, 13, 11, 1)]

        page.get_by_role("checkbox", name="run-11").click()
        until(page, "document.querySelectorAll('.run-card').length === 2")
        assert page.url.endswith("#/curves?runs=run-0%2Crun-11")
        colors = page.eval_on_selector_all(
            ".run-card .swatch",
            "nodes => nodes.map((node) => getComputedStyle(node).backgroundColor)",
        )
        assert len(set(colors)) == 2

        page.get_by_role("link", name="run-13").click()
        until(page, "document.querySelector('.run-card strong')?.textContent === 'run-13'")
        page.reload()
        page.wait_for_selector(".rail-group")
        assert page.get_by_label("Group").input_value() == "model", "the choice is kept"


def test_a_seventh_run_cannot_be_chosen(chromium: Any, many: Served) -> None:
    six = ",".join(f"run-{number}" for number in range(6))
    with opened(chromium, many, f"#/curves?runs={six}") as page:
        page.wait_for_selector(".chart canvas")
        assert page.get_by_role("checkbox", name="run-6", exact=True).is_disabled()
        page.get_by_role("checkbox", name="run-0", exact=True).click()
        until(page, "document.querySelectorAll('.run-card').length === 5")
        assert page.get_by_role("checkbox", name="run-6", exact=True).is_enabled()


def test_cursor_shows_values_in_all_charts(chromium: Any, viewer: Served) -> None:
    with opened(chromium, viewer, "#/curves?runs=growing") as page:
        page.wait_for_selector(".chart canvas")
        over = page.locator(".u-over").first.bounding_box()
        page.mouse.move(over["x"] + over["width"] * 9 / 19, over["y"] + 20)
        until(page, "document.querySelector('.legend .at')?.textContent === 'step 10'")
        legends = page.locator(".legend").all_inner_texts()
        assert legends[0].split() == ["step", "10", "reward", "-0.55"]
        assert legends[1].split() == ["step", "10", "accuracy", "0.225"]
        assert all(legend.startswith("step 10") for legend in legends)


def test_a_click_opens_episodes_of_that_step(chromium: Any, viewer: Served) -> None:
    with opened(chromium, viewer, "#/curves?runs=growing") as page:
        page.wait_for_selector(".chart canvas")
        over = page.locator(".u-over").first.bounding_box()
        page.mouse.click(over["x"] + over["width"] * 9 / 19, over["y"] + 20)
        page.wait_for_selector(".episodes tbody tr")
        assert page.get_by_label("From step").input_value() == "10"
        assert page.get_by_label("to step").input_value() == "10"
        assert page.get_by_role("status").last.inner_text() == "4 of 80 episodes"


def test_sparse_curve_shows_its_nearest_value(chromium: Any, tmp_path: Path) -> None:
    run = ExampleRun(tmp_path / "run", episodes=0)
    run.evaluate(**{MetricName.HELD_OUT_ACCURACY: 0.25})
    run.add(40)
    run.close()
    with served(tmp_path) as viewer, opened(chromium, viewer) as page:
        page.wait_for_selector(".chart canvas")
        chart = page.locator(".chart", has_text="held-out accuracy")
        over = chart.locator(".u-over").bounding_box()
        page.mouse.move(over["x"] + over["width"] / 2, over["y"] + 20)
        until(page, "document.querySelector('.legend .at')?.textContent === 'step 20'")
        assert "held-out accuracy 0.25 (step 0)" in chart.locator(".legend").inner_text()


def test_differences_between_configurations_are_listed(chromium: Any, many: Served) -> None:
    with opened(chromium, many, "#/config?runs=run-0,run-1") as page:
        page.wait_for_selector(".differences td")
        rows = page.locator(".differences tbody tr").all_inner_texts()
        assert [row.split("\t") for row in rows] == [
            ["model.num_layers", "4", "5"],
            ["optimizer.lr", "0.001", "0.002"],
            ["tracking.tags", '["wide"]', '["baseline", "long"]'],
        ]
        assert page.get_by_text("3 keys differ, 4 are equal").count() == 1
        page.get_by_role("searchbox", name="Key").fill("LR")
        assert page.locator(".differences tbody tr").count() == 1
        page.get_by_role("checkbox", name="run-2", exact=True).click()
        until(page, "document.querySelectorAll('.differences thead th').length === 4")
        page.get_by_role("link", name="run-3", exact=True).click()
        until(page, "document.querySelector('h1').textContent === 'Configuration of run-3'")
        assert "num_layers: 5" in page.locator("pre.card").inner_text()


def test_reading_many_runs_does_not_delay_first_page(chromium: Any, tmp_path: Path) -> None:
    """Runs that are not read yet have their newest figures, and then their checks."""
    write_runs(tmp_path, 3)
    with served(tmp_path) as viewer, pytest.MonkeyPatch.context() as patch:
        patch.setattr("launch.viewer.server.OVERVIEW_SECONDS", -1.0)
        patch.setattr("launch.viewer.server.READING_SECONDS", -1.0)
        listed = viewer.get("/api/runs").json["runs"]
        assert [run["is_checked"] for run in listed] == [False] * 3
        assert [run["headlines"]["reward"] for run in listed] == [0.0, -1.0, -2.0]
        with opened(chromium, viewer, "#/curves?runs=run-1") as page:
            page.wait_for_selector(".chart canvas")
            assert "reading" in page.locator(".run", has_text="run-2").inner_text()
            patch.undo()
            until(page, "!document.querySelector('.rail-list').innerText.includes('reading')")
