"""Viewer of damaged runs: readable parts are shown, and the others are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_loop.tracking.episode_files import list_files, write_episodes
from rl_loop.tracking.episode_recorder import EpisodeRecorder
from tests.support.launch.viewer.served import ExampleRun, Served, served
from tests.support.recorded_episodes import VOCABULARY, groups_of_step, record_steps, train_split


def fetch_page(viewer: Served, query: str = "") -> dict[str, Any]:
    answer = viewer.get(f"/api/runs/run/episodes?{query}")
    assert answer.status == 200, answer.body
    page: dict[str, Any] = answer.json
    return page


@pytest.fixture
def episodes(tmp_path: Path) -> Path:
    """Create three files with four episodes each."""
    run = ExampleRun(tmp_path / "run", steps=3)
    run.close()
    return run.directory.episodes


@pytest.mark.parametrize("damage", ["cut short", "empty", "of something else"])
def test_a_damaged_file_is_named_and_the_others_are_shown(
    episodes: Path, tmp_path: Path, damage: str
) -> None:
    path = list_files(episodes)[1].path
    whole = path.read_bytes()
    broken = {"cut short": whole[:-20], "empty": b"", "of something else": b"PAR1 or not PAR1"}
    path.write_bytes(broken[damage])
    with served(tmp_path) as viewer:
        for query in ("", "text=compute", "sort=reward"):
            page = fetch_page(viewer, query)
            assert {row["step"] for row in page["rows"]} == {1, 3}
            assert page["total"] == page["recorded"] == 8
            (named,) = page["damaged"]
            assert named.startswith(f"{path} is damaged")

        # The restored file is readable.
        path.write_bytes(whole)
        page = fetch_page(viewer)
        assert (page["total"], page["damaged"]) == (12, [])


def damage_text(path: Path) -> None:
    """Flip a bit of the recorded text."""
    row_group = pq.read_metadata(path).row_group(0)
    columns = [row_group.column(i) for i in range(row_group.num_columns)]
    (text,) = [c for c in columns if c.path_in_schema == "turns.list.element.text"]
    data = bytearray(path.read_bytes())
    data[text.data_page_offset + text.total_compressed_size - 1] ^= 1
    path.write_bytes(data)


def test_damaged_text_is_left_out_of_a_search_and_named(episodes: Path, tmp_path: Path) -> None:
    path = list_files(episodes)[1].path
    damage_text(path)
    with served(tmp_path) as viewer:
        assert fetch_page(viewer)["damaged"] == []
        page = fetch_page(viewer, "text=compute")
        assert (page["total"], page["searched"], page["recorded"]) == (8, 12, 12)
        assert page["damaged"][0].startswith(f"{path} is damaged")

        (broken,) = fetch_page(viewer, "step_from=2&step_to=2&limit=1")["rows"]
        answer = viewer.get(f"/api/runs/run/episodes/{broken['id']}")
        assert answer.status == 400
        assert f"{path} is damaged" in answer.json["error"]


@pytest.mark.parametrize("content", [None, b"PAR1"])
def test_without_the_text_of_tokens_their_ids_are_shown(
    episodes: Path, tmp_path: Path, content: bytes | None
) -> None:
    path = episodes / "vocabulary.parquet"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with served(tmp_path) as viewer:
        episode = viewer.get("/api/runs/run/episodes/0").json
        assert episode["texts"] == [f"<{token}>" for token in episode["token_ids"]]
        assert [text.startswith(str(path)) for text in fetch_page(viewer)["damaged"]] == (
            [] if content is None else [True]
        )


def test_an_episode_without_a_task_id_has_a_row(tmp_path: Path) -> None:
    run = ExampleRun(tmp_path / "run")
    run.close()
    group = groups_of_step(0, tasks=1)[0]
    for episode in group.trajectories:
        episode.task_id = ""
    with EpisodeRecorder(run.directory.episodes, VOCABULARY, "all") as recorder:
        recorder.record(0, [train_split([replace(group, task_id="")])])
    with served(tmp_path) as viewer:
        assert [row["task_id"] for row in fetch_page(viewer)["rows"]] == ["", ""]
        assert fetch_page(viewer, "task=sum")["total"] == 0
        assert viewer.get("/api/runs/run/episodes/0").json["task_id"] == ""


def test_file_without_a_column_is_left_out_and_named(episodes: Path, tmp_path: Path) -> None:
    first, second = list_files(episodes)[:2]
    pq.write_table(pq.read_table(first.path).drop_columns("task_id"), first.path)
    pq.write_table(pq.read_table(second.path).drop_columns("turns"), second.path)
    with served(tmp_path) as viewer:
        page = fetch_page(viewer)
        assert page["total"] == 4
        assert [damage.partition(". ")[0].rpartition(": ")[2] for damage in page["damaged"]] == [
            "columns are missing (task_id)",
            "columns are missing (turns)",
        ]


def test_leftovers_of_a_merge_are_shown_once(episodes: Path, tmp_path: Path) -> None:
    # A crash may happen between the write of the merged file and the deletion of the others.
    tables = [pq.read_table(file.path) for file in list_files(episodes)]
    merged = write_episodes(episodes, 100, pa.concat_tables(tables))
    merged.rename(episodes / "000000-000002.parquet")
    with served(tmp_path) as viewer:
        assert fetch_page(viewer)["total"] == 12


def test_files_that_are_merged_under_the_reader_lose_no_episode(tmp_path: Path) -> None:
    run = ExampleRun(tmp_path / "run", steps=31)
    with served(tmp_path) as viewer:
        ids = {row["id"] for row in fetch_page(viewer, "limit=500")["rows"]}
        run.add(2)
        assert len(list_files(run.directory.episodes)) == 2
        assert viewer.get("/api/runs/run/episodes/0").status == 200
        now = {row["id"] for row in fetch_page(viewer, "limit=500")["rows"]}
        assert ids < now and len(now) == 33 * 4
    run.close()


def test_run_without_recorded_episodes_has_an_empty_table(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text("training: {steps: 5}\n")
    (path / "episodes.jsonl").write_text('{"step": 0, "reward": 1.0}\n')
    with served(tmp_path) as viewer:
        page = fetch_page(viewer)
        assert (page["total"], page["recorded"], page["damaged"]) == (0, 0, [])


LINES = [
    b'{"step": 0, "time": 1.0, "reward": 0.5, "seconds/step": 2.0}',
    b'{"step": 1, "time": 2.0, "rew',
    b"\xff\xfe\x00 garbage",
    b"[1, 2]",
    b'{"reward": 1.0}',
    b'{"step": "two", "reward": 1.0}',
    b'{"step": 2, "time": 3.0, "reward": "high", "seconds/step": [1], "grad_norm": true}',
    b'{"step": 3, "time": 4.0, "reward": 0.75, "grad_norm": NaN}',
]


def test_lines_of_metrics_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_bytes(b"\n".join(LINES) + b"\n")
    (path / "metrics.describe.json").write_text("{")
    (path / "summary.json").write_bytes(b"\x00")
    with served(tmp_path) as viewer:
        (run,) = viewer.get("/api/runs").json["runs"]
        assert (run["step"], run["headlines"]["reward"]) == (3, 0.75)
        curves = viewer.get("/api/runs/run/curves").json
        assert curves["steps"] == [0, 2, 3]
        assert curves["metrics"]["reward"] == [0.5, None, 0.75]


@pytest.mark.parametrize(
    "content", ["training:", "training: [1]", "training: {steps: many}", "algorithm: x"]
)
def test_a_configuration_of_another_shape_hides_no_run(tmp_path: Path, content: str) -> None:
    whole = ExampleRun(tmp_path / "whole", steps=1)
    whole.close()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.yaml").write_text(f"{content}\n")
    record_steps(tmp_path / "odd" / "episodes", [0])
    with served(tmp_path) as viewer:
        runs = {run["name"]: run for run in viewer.get("/api/runs").json["runs"]}
        assert set(runs) == {"odd", "whole"}
        assert runs["odd"]["steps"] is None
        assert viewer.get("/api/runs/odd/episodes").json["total"] == 4
