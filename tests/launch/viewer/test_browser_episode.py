"""Page of an episode in Chromium: timeline, copy, export, and conversations of SFT."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rl_loop.tracking.episode_recorder import EpisodeRecorder
from tests.support.launch.viewer.browser import THEMES, WIDTHS, barriers, fits, opened
from tests.support.launch.viewer.served import ExampleRun, Served, served
from tests.support.recorded_episodes import VOCABULARY, build_samples, groups_of_step

pytestmark = pytest.mark.browser

EPISODE = "#/episode?run=growing&id=0"


def test_timeline_shows_seconds_and_tokens_of_turns(chromium: Any, viewer: Served) -> None:
    with opened(chromium, viewer, EPISODE) as page:
        page.wait_for_selector(".message.final")
        # Four sampled turns of 0.5 s after 0.25 s of waiting, and two of a tool with 1.5 s.
        assert page.locator(".timeline summary").inner_text() == "Timeline: 6 s"
        totals = page.locator(".totals .total").all_inner_texts()
        assert [text.strip() for text in totals] == ["waiting 1 s", "sampling 2 s", "tool 3 s"]
        turns = page.locator(".turn").all_inner_texts()
        assert turns[0].split("\n") == ["1 prompt", "8 tokens"]
        assert turns[3].split("\n") == ["4 sampling", "waited 250 ms, 500 ms, 6 tokens"]
        assert turns[4].split("\n") == ["5 tool", "1.5 s, 5 tokens"]

        # Bars follow each other and fill the line.
        bars = page.eval_on_selector_all(
            ".bar",
            "bars => bars.map((bar) => [bar.dataset.kind, bar.offsetLeft, bar.offsetWidth])",
        )
        for (_, left, width), (_, following, _) in pairwise(bars):
            assert abs(left + width - following) <= 2
        by_kind = {kind: width for kind, _, width in bars}
        assert 2.7 < by_kind["tool"] / by_kind["sampling"] < 3.3

        page.locator(".turn").nth(4).click()
        assert page.locator(".message.found").count() == 1
        assert page.locator(".message.found .who").inner_text().startswith("python")


def test_side_of_an_episode_is_the_right_third(chromium: Any, viewer: Served) -> None:
    with opened(chromium, viewer, EPISODE) as page:
        page.wait_for_selector(".message.final")
        side = page.locator(".side").bounding_box()
        assert 400 < side["width"] < 500 and side["x"] + side["width"] > 1350
        assert page.locator(".facts-list").is_visible()
        kinds = page.eval_on_selector_all(
            ".outcome .chip", "chips => chips.map((chip) => chip.dataset.kind)"
        )
        assert {"reward", "end", "tools", "tokens", "answer"} == set(kinds)


def test_an_episode_can_be_copied_and_exported(
    chromium: Any, viewer: Served, tmp_path: Path
) -> None:
    with opened(chromium, viewer, EPISODE) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.wait_for_selector(".message.final")
        page.get_by_role("button", name="Copy the whole conversation").click()
        text = page.evaluate("navigator.clipboard.readText()")
        assert text.startswith("[user]\nCompute 2 + 2\n\n[assistant commentary to python]\nprint(")
        page.get_by_role("button", name="Copy the message of python").click()
        assert page.evaluate("navigator.clipboard.readText()") == "4"

        with page.expect_download() as download:
            page.get_by_role("link", name="Export as JSON").click()
        assert download.value.suggested_filename == "growing-step1-train-0-0.json"
        file = tmp_path / "episode.json"
        download.value.save_as(file)
        episode = json.loads(file.read_text())
        assert (episode["reward"], len(episode["token_ids"])) == (1.0, 36)
        assert episode["messages"][0]["role"] == "user"


@pytest.mark.parametrize(("width", "theme"), list(zip(WIDTHS, THEMES, strict=True)))
def test_sft_run_shows_its_conversations(
    chromium: Any, tmp_path: Path, width: int, theme: str
) -> None:
    run = ExampleRun(
        tmp_path / "tuned", config="sequences_per_step: 4\ntraining: {{steps: 9}}\n", episodes=0
    )
    run.add(2)
    run.close()
    with EpisodeRecorder(run.directory.episodes, VOCABULARY, 3) as recorder:
        recorder.record_conversations(1, build_samples(groups_of_step(1)))
        recorder.record_conversations(2, build_samples(groups_of_step(2)))
    with (
        served(tmp_path) as viewer,
        opened(chromium, viewer, "#/curves", width, theme) as page,
    ):
        page.get_by_role("link", name="Conversations").click()
        page.wait_for_selector(".episodes tbody tr")
        assert page.get_by_role("status").last.inner_text() == "6 of 6 conversations"
        heads = page.locator(".episodes thead th").all_text_contents()
        assert heads == [
            "Step",
            "Conversation",
            "Turns in the loss",
            "Tokens",
            "Tokens in the loss",
        ]
        assert page.get_by_label("Reward from").count() == 0
        page.get_by_role("link", name="sum/2-1").first.click()
        page.wait_for_selector(".message.final")
        assert page.locator(".outcome").inner_text() == "in the loss 16 of 36 tokens"
        assert page.get_by_role("link", name="Same task").count() == 0
        assert "in the loss" in page.locator(".turn").nth(1).text_content()
        assert fits(page)
        assert barriers(page) == []
