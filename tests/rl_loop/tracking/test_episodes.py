"""Recorded episodes: content, files, resume after a kill, and search."""

import errno
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rl_loop.config.errors import ConfigError
from rl_loop.config.run import RlConfig
from rl_loop.data.response_check import TrainedTokens
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup, Turn
from rl_loop.rollout.group_stream import AdmittedGroup
from rl_loop.run_parts import build_tasks
from rl_loop.tracking import episode_files
from rl_loop.tracking.episode_files import delete_steps_after, list_files, read_row_groups
from rl_loop.tracking.episode_reader import EpisodeReader
from rl_loop.tracking.episode_recorder import EpisodeRecorder
from rl_loop.tracking.episode_table import SCHEMA, SplitEpisodes, episode_table
from rl_loop.tracking.run_directory import RunDirectoryError, RunWriteError, read_json_lines
from tests.support.in_process import LocalRollouts, local_loop
from tests.support.recorded_episodes import (
    VOCABULARY,
    build_samples,
    failed,
    groups_of_step,
    record_steps,
    solved,
    train_split,
)
from tests.support.rl_loop.scripted_loop import answered, from_file
from tests.support.rl_loop.small_config import config
from tests.support.rl_loop.tracking.full_disk import no_file_beyond


def open_reader(directory: Path) -> EpisodeReader:
    reader = EpisodeReader(directory)
    reader.refresh()
    return reader


def steps_in(directory: Path) -> list[int]:
    steps: list[int] = open_reader(directory).summary_table.column("step").to_pylist()
    return steps


# ---- content


def test_conversations_of_sft_have_no_reward(tmp_path: Path) -> None:
    samples = build_samples(groups_of_step(1))
    with EpisodeRecorder(tmp_path, VOCABULARY, 2) as recorder:
        recorder.record_conversations(5, samples)
    reader = open_reader(tmp_path)
    assert reader.summary_table.column("task_id").to_pylist() == [
        samples.names[0],
        samples.names[2],
    ]
    episode = reader.read(1)
    assert episode is not None
    assert (episode["step"], episode["reward"], episode["advantage"]) == (5, None, None)
    assert episode["loss_mask"] == samples.rows("loss_mask")[2].tolist()
    roles = [(turn["role"], turn["text"][:9]) for turn in episode["turns"]]
    assert roles == [
        ("prompt", "<|start|>"),
        ("assistant", "<|channel"),
        ("user", "<|start|>"),
        ("assistant", "<|channel"),
    ]
    assert (
        reader.search("the answer is", 10).ids.tolist()
        == reader.summary_table.column("id").to_pylist()
    )


def test_recorded_episode_is_read_unchanged(tmp_path: Path) -> None:
    groups = groups_of_step(3)
    with EpisodeRecorder(tmp_path, VOCABULARY, "all") as recorder:
        recorder.record(3, [train_split(groups)])
    reader = open_reader(tmp_path)
    ids = reader.summary_table.column("id").to_pylist()
    assert len(ids) == len(set(ids)) == 4

    original = groups[1].trajectories[0]
    episode = reader.read(ids[2])
    assert episode is not None
    assert (episode["group"], episode["sample"], episode["task_id"]) == (1, 0, "sum/3-1")
    assert episode["token_ids"] == original.token_ids.tolist()
    assert episode["loss_mask"] == original.loss_mask.tolist()
    assert episode["rollout_log_probs"] == original.rollout_log_probs.tolist()
    assert episode["turns"] == [vars(turn) for turn in original.turns]
    assert episode["weight_versions"] == [vars(span) for span in original.weight_versions]
    assert episode["reward_parts"] == original.reward_parts
    assert "".join(episode["texts"]) == "".join(turn.text for turn in original.turns)
    assert set(episode["advantages"]) == {0.0, 1.0}
    assert (episode["advantage"], episode["log_prob_gap"]) == (1.0, 0.25)
    assert (episode["oldest_version"], episode["newest_version"]) == (3, 3)


def test_invalid_episode_is_recorded_with_reason_and_no_reward() -> None:
    groups = groups_of_step(0, tasks=2)
    groups[0].invalid.append(failed("sum/0-0"))
    rows = episode_table(0, [train_split(groups)]).to_pylist()
    assert [row["sample"] for row in rows] == [0, 1, 2, 0, 1]
    assert rows[2]["invalid"] == "sandbox"
    assert rows[2]["invalid_reason"] == "bwrap: no memory"
    assert (rows[2]["reward"], rows[2]["advantages"]) == (None, None)
    # The rows after the invalid one keep the estimates of their tokens.
    assert [row["advantage"] for row in rows] == [1.0, -1.0, None, 1.0, -1.0]


def test_excluded_episode_has_no_advantage() -> None:
    groups = groups_of_step(0, tasks=1)
    groups[0].trajectories[1].excluded = True
    rows = episode_table(0, [train_split(groups)]).to_pylist()
    assert [row["advantage"] for row in rows] == [1.0, None]
    assert [row["excluded"] for row in rows] == [False, True]


def test_held_out_episodes_have_no_trainer_log_probs() -> None:
    held_out = SplitEpisodes("held_out", groups_of_step(0, tasks=1))
    rows = episode_table(0, [train_split(groups_of_step(0, tasks=1)), held_out]).to_pylist()
    assert [row["split"] for row in rows] == ["train", "train", "held_out", "held_out"]
    assert [row["trainer_log_probs"] is None for row in rows] == [False, False, True, True]


def test_token_values_of_an_update_are_recorded_if_sampled() -> None:
    split = train_split(groups_of_step(0, tasks=1))
    assert split.trained is not None and split.samples is not None
    everywhere = np.full(split.samples.tokens, -2.0, np.float32)
    rows = episode_table(
        0, [replace(split, trained=TrainedTokens(everywhere, -everywhere))]
    ).to_pylist()
    for row in rows:
        assert row["trainer_log_probs"] == [-2.0 if mask else 0.0 for mask in row["loss_mask"]]
        assert row["entropy"] == [2.0 if mask else 0.0 for mask in row["loss_mask"]]


def test_episode_without_an_update_has_no_update_values() -> None:
    split = train_split(groups_of_step(0, tasks=1))
    assert split.trained is not None and split.samples is not None
    first = slice(1, int(split.samples.offsets[1]))
    split.trained.log_probs[first] = split.trained.entropy[first] = np.nan
    rows = episode_table(0, [split]).to_pylist()
    for name in ("trainer_log_probs", "entropy", "log_prob_gap"):
        assert [row[name] is None for row in rows] == [True, False], name
    assert [row["advantage"] for row in rows] == [1.0, -1.0]


def test_text_with_a_lone_surrogate_is_recorded(tmp_path: Path) -> None:
    trajectory = Trajectory(
        "task",
        token_ids=[0],
        loss_mask=[0],
        rollout_log_probs=[0.0],
        turns=[Turn("prompt", 0, 1, "half \udc80")],
    )
    with EpisodeRecorder(tmp_path, VOCABULARY, "all") as recorder:
        recorder.record(0, [SplitEpisodes("train", [TrajectoryGroup("task", [trajectory])])])
    episode = open_reader(tmp_path).read(0)
    assert episode is not None and episode["turns"][0]["text"] == "half ?"


def test_step_without_episodes_is_recorded(tmp_path: Path) -> None:
    with EpisodeRecorder(tmp_path, VOCABULARY, "all") as recorder:
        recorder.record(0, [SplitEpisodes("train", [TrajectoryGroup("task", [])])])
        recorder.record(1, [train_split(groups_of_step(1))])
    assert steps_in(tmp_path) == [1] * 4


@pytest.mark.parametrize(("keep", "recorded"), [("all", 12), (3, 3), (20, 12), (0, 0)])
def test_limited_number_of_episodes_is_spread_over_the_tasks(
    tmp_path: Path, keep: int, recorded: int
) -> None:
    with EpisodeRecorder(tmp_path, VOCABULARY, keep) as recorder:
        recorder.record(0, [train_split(groups_of_step(0, tasks=6))])
    groups = open_reader(tmp_path).summary_table.column("group").to_pylist()
    assert len(groups) == recorded
    if keep == 3:
        assert groups == [0, 2, 4]


# ---- files


def test_many_small_files_are_merged_without_losing_episodes(tmp_path: Path) -> None:
    record_steps(tmp_path, range(70))
    names = [file.path.name for file in list_files(tmp_path)]
    assert names[:2] == ["000000-000031.parquet", "000032-000063.parquet"]
    assert len(names) == 2 + 6
    assert steps_in(tmp_path) == [step for step in range(70) for _ in range(4)]
    ids = open_reader(tmp_path).summary_table.column("id").to_pylist()
    assert ids == sorted(set(ids))


def test_files_beyond_a_size_are_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_files, "MAX_MERGED_BYTES", 1000)
    record_steps(tmp_path, range(33))
    assert len(list_files(tmp_path)) == 33


def test_files_left_by_a_killed_merge_are_not_read_twice(tmp_path: Path) -> None:
    record_steps(tmp_path, range(31))
    before = {file.path: file.path.read_bytes() for file in list_files(tmp_path)}
    with EpisodeRecorder(tmp_path, VOCABULARY, "all") as recorder:
        recorder.record(31, [train_split(groups_of_step(31))])
    # The process was killed after writing the merged file and before deleting the others.
    for path, content in before.items():
        path.write_bytes(content)
    expected = [step for step in range(32) for _ in range(4)]
    assert steps_in(tmp_path) == expected
    delete_steps_after(tmp_path, 100)
    assert [path.name for path in tmp_path.glob("0*")] == ["000000-000031.parquet"]
    assert steps_in(tmp_path) == expected


def test_row_group_has_at_most_the_configured_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = len(solved("task"))
    monkeypatch.setattr(episode_files, "ROW_GROUP_TOKENS", 5 * length)
    record_steps(tmp_path, [0], tasks=7, samples=2)
    (file,) = list_files(tmp_path)
    metadata = pq.ParquetFile(file.path).metadata
    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sum(rows) == 14
    assert max(rows) <= 5
    reader = open_reader(tmp_path)
    for episode_id in reader.summary_table.column("id").to_pylist():
        episode = reader.read(episode_id)
        assert episode is not None and episode["id"] == episode_id


def test_columns_are_compressed_and_floats_split_into_bytes(tmp_path: Path) -> None:
    record_steps(tmp_path, [0])
    (file,) = list_files(tmp_path)
    row_group = pq.ParquetFile(file.path).metadata.row_group(0)
    columns = [row_group.column(i) for i in range(row_group.num_columns)]
    assert {column.compression for column in columns} == {"ZSTD"}
    encodings = {column.path_in_schema: column.encodings for column in columns}
    assert "BYTE_STREAM_SPLIT" in encodings["rollout_log_probs.list.element"]
    assert "RLE_DICTIONARY" in encodings["token_ids.list.element"]
    assert "RLE_DICTIONARY" not in encodings["turns.list.element.text"]
    assert pq.read_schema(file.path).names == SCHEMA.names


def test_flipped_bit_in_any_column_is_an_error(tmp_path: Path) -> None:
    record_steps(tmp_path, [0])
    path = tmp_path / "000000-000000.parquet"
    pristine = path.read_bytes()
    row_group = pq.read_metadata(path).row_group(0)
    assert row_group.num_columns > 40
    for number in range(row_group.num_columns):
        column = row_group.column(number)
        last = column.data_page_offset + column.total_compressed_size - 1
        if column.dictionary_page_offset is not None:
            last -= column.data_page_offset - column.dictionary_page_offset

        damaged = bytearray(pristine)
        damaged[last] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(RunDirectoryError, match=r"000000-000000\.parquet is damaged"):
            list(read_row_groups(path))


def test_truncated_file_is_named(tmp_path: Path) -> None:
    record_steps(tmp_path, [0])
    (file,) = list_files(tmp_path)
    file.path.write_bytes(file.path.read_bytes()[:-20])
    with pytest.raises(RunDirectoryError, match=r"000000-000000\.parquet is damaged"):
        open_reader(tmp_path)


# ---- resume, kills and full disks


def test_resume_drops_later_steps_and_appends_to_the_others(tmp_path: Path) -> None:
    record_steps(tmp_path, range(40))
    with EpisodeRecorder(tmp_path, VOCABULARY, "all", resume_after=9) as recorder:
        assert steps_in(tmp_path) == [step for step in range(10) for _ in range(4)]
        recorder.record(10, [train_split(groups_of_step(10))])
    assert steps_in(tmp_path) == [step for step in range(11) for _ in range(4)]
    ids = open_reader(tmp_path).summary_table.column("id").to_pylist()
    assert ids == sorted(set(ids))


def test_new_run_keeps_no_recorded_step(tmp_path: Path) -> None:
    record_steps(tmp_path, range(3))
    delete_steps_after(tmp_path, -1)
    assert steps_in(tmp_path) == []
    delete_steps_after(tmp_path / "missing", 4)


KILLED = """
import sys
from pathlib import Path
from tests.support.recorded_episodes import VOCABULARY, groups_of_step, train_split
from rl_loop.tracking.episode_recorder import EpisodeRecorder
with EpisodeRecorder(Path(sys.argv[1]), VOCABULARY, "all") as recorder:
    for step in range(100_000):
        recorder.record(step, [train_split(groups_of_step(step))])
        recorder.finish_writing()
        print(step, flush=True)
"""


def record_until_killed(directory: Path, after: int) -> int:
    """Record in another process and kill it after a step.

    Returns:
        The last step that the process reported as written.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(directory)], stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    last = -1
    for line in process.stdout:
        last = int(line)
        if last >= after:
            break
    process.send_signal(signal.SIGKILL)
    last = max([last, *map(int, process.stdout.read().split())])
    process.wait()
    return last


@pytest.mark.parametrize("after", [5, 31, 63])
def test_killed_run_leaves_complete_steps_in_readable_files(tmp_path: Path, after: int) -> None:
    last = record_until_killed(tmp_path, after)
    recorded = steps_in(tmp_path)
    # The step in progress is recorded completely or not at all.
    assert recorded in (
        [step for step in range(last + 1) for _ in range(4)],
        [step for step in range(last + 2) for _ in range(4)],
    )
    with EpisodeRecorder(tmp_path, VOCABULARY, "all", resume_after=last - 2) as recorder:
        for step in range(last - 1, last + 2):
            recorder.record(step, [train_split(groups_of_step(step))])
    assert steps_in(tmp_path) == [step for step in range(last + 2) for _ in range(4)]
    assert not list(tmp_path.glob(".*"))


def test_full_disk_is_raised_by_the_next_call(tmp_path: Path) -> None:
    record_steps(tmp_path, [0])
    recorder = EpisodeRecorder(tmp_path, VOCABULARY, "all")
    with no_file_beyond(1000):
        recorder.record(1, [train_split(groups_of_step(1))])
        with pytest.raises(
            RunWriteError, match=r"000001-000001\.parquet could not be written"
        ) as full:
            recorder.finish_writing()
    assert full.value.errno == errno.EFBIG
    recorder.finish_writing()  # raises the error only once
    assert steps_in(tmp_path) == [0] * 4


def test_failed_write_does_not_hide_the_error_that_ended_the_run(tmp_path: Path) -> None:
    with (
        no_file_beyond(1000),
        pytest.raises(ValueError, match="the reason"),
        EpisodeRecorder(tmp_path, VOCABULARY, "all") as recorder,
    ):
        recorder.record(0, [train_split(groups_of_step(0))])
        raise ValueError("the reason")


# ---- in the loop


def test_loop_records_every_episode_across_a_resume(tmp_path: Path) -> None:
    def run(name: str, steps: int, resume: bool = False) -> Path:
        settings = config(
            tmp_path,
            f"name={name}",
            f"training.steps={steps}",
            "training.checkpoint_every=2",
            "optimizer.schedule=constant",
        )
        with local_loop(settings, resume=resume) as loop:
            loop.train()
            loop.evaluate()
            return loop.recorder.run.episodes

    def rows(directory: Path) -> list[dict[str, object]]:
        names = ["step", "split", "group", "sample", "task_id", "reward", "tokens"]
        names.append("newest_version")
        reader = open_reader(directory)
        return reader.summary_table.select(names).to_pylist()

    whole = rows(run("whole", steps=4))
    run("cut", steps=2)
    assert rows(run("cut", steps=4, resume=True)) == whole

    episodes = tmp_path / "whole/episodes"
    is_train = [row["split"] == "train" for row in whole]
    gaps = open_reader(episodes).summary_table.column("log_prob_gap").to_pylist()
    assert [gap is not None for gap in gaps] == is_train
    assert 0 < max(gap for gap in gaps if gap is not None) < 1e-4, (
        "trainer and engine compute in different orders"
    )
    entropy = [
        row
        for file in list_files(episodes)
        for row in pq.read_table(file.path)["entropy"].to_pylist()
    ]
    assert [row is not None and max(row) > 1 for row in entropy] == is_train

    settings = config(tmp_path)
    truths = {task.task_id: task.ground_truth for task in build_tasks(settings).train(0, 3)}
    expected = (
        open_reader(episodes).summary_table.select(["task_id", "expected_answer"]).to_pylist()
    )
    known = [row for row in expected if row["task_id"] in truths]
    assert known and all(row["expected_answer"] == truths[row["task_id"]] for row in known)
    assert all(row["expected_answer"] for row in expected)

    per_step = settings.rollout.tasks_per_step * settings.rollout.samples_per_task
    training_steps = [row["step"] for row in whole if row["split"] == "train"]
    assert training_steps == [step for step in range(1, 5) for _ in range(per_step)]
    assert {row["step"] for row in whole if row["split"] == "held_out"} >= {0, 4}
    assert all(row["newest_version"] == row["step"] - 1 for row in whole if row["split"] == "train")
    assert all(row["newest_version"] == row["step"] for row in whole if row["split"] == "held_out")


def test_groups_replaced_by_dynamic_sampling_are_recorded(tmp_path: Path) -> None:
    options = [*from_file(tmp_path, 60), "algorithm.dynamic_sampling_rounds=3", "training.steps=1"]
    settings = config(tmp_path, *options)
    without_signal = build_tasks(settings).train(0, 1)[0].task_id

    class Rewards(LocalRollouts):
        """Rollouts in which all tasks except the first have different rewards."""

        def begin(self, admitted: AdmittedGroup) -> None:
            is_without_signal = admitted.request.task.task_id == without_signal
            rewards = (1.0,) if is_without_signal else (-1.0, 1.0)
            admitted.end(answered(admitted.request, 0, rewards))

    rollouts = Rewards(settings)
    with local_loop(settings, rollouts) as loop:
        loop.train()
        loop.recorder.finish_writing()
        directory = loop.recorder.run.episodes
        _, metrics = read_json_lines(loop.recorder.run.metrics)
    rollouts.close()

    rows = open_reader(directory).summary_table.select(["split", "task_id", "advantage", "sample"])
    replaced = [row for row in rows.to_pylist() if row["split"] == "replaced"]
    assert metrics["rollout/groups_replaced"] == 1
    assert [row["task_id"] for row in replaced] == [
        without_signal
    ] * settings.rollout.samples_per_task
    assert all(row["advantage"] is None for row in replaced)


def test_negative_tracking_episodes_is_rejected(tmp_path: Path) -> None:
    settings: RlConfig = config(tmp_path, "tracking.episodes=7")
    assert settings.tracking.episodes == 7
    with pytest.raises(ConfigError, match=r"tracking\.episodes"):
        config(tmp_path, "tracking.episodes=-1")


# ---- reading


def test_refreshed_reader_finds_and_searches_new_episodes(tmp_path: Path) -> None:
    reader = open_reader(tmp_path / "episodes")
    assert reader.summary_table.num_rows == 0
    record_steps(tmp_path / "episodes", range(3))
    reader.refresh()
    assert reader.summary_table.num_rows == 12

    search = reader.search("THE ANSWER IS 5", seconds=10)
    assert (len(search.ids), search.searched, search.of) == (6, 12, 12)
    assert len(reader.search("nobody says this", seconds=10).ids) == 0
    assert len(reader.search("print(2", seconds=10).ids) == 12
    # Text that looks like a pattern is searched literally.
    assert len(reader.search("2 + 2", seconds=10).ids) == 12
    assert len(reader.search(".*", seconds=10).ids) == 0


SAID = [
    "Die STRAẞE nach Köln",
    r"C:\path (x|y)* [0-9]+ ^a$ \d",
    "two\nlines\tand_under",
    "ΔΕΛΤΑ is a delta",
]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("nach k", [0]),
        ("NACH KÖLN", [0]),
        ("straße", [0]),
        (r"(X|Y)* [0-9]+ ^A$ \D", [1]),
        (r"c:\PATH", [1]),
        ("TWO\nLINES\tAND_", [2]),
        ("δελτα IS", [3]),
        ("DELTA", [3]),
        ("a", [0, 1, 2, 3]),
        ("o..o", []),
        ("(?i)two", []),
    ],
)
def test_search_ignores_case_and_matches_literally(
    tmp_path: Path, text: str, where: list[int]
) -> None:
    group = groups_of_step(0, tasks=1, samples=len(SAID))[0]
    for episode, said in zip(group.trajectories, SAID, strict=True):
        episode.turns = [replace(episode.turns[0], text=said), replace(episode.turns[1], text="-")]
    with EpisodeRecorder(tmp_path, VOCABULARY, "all") as recorder:
        recorder.record(0, [SplitEpisodes("train", [group])])
    assert sorted(open_reader(tmp_path).search(text, seconds=10).ids.tolist()) == where


def test_search_out_of_time_continues_in_the_next_call(tmp_path: Path) -> None:
    record_steps(tmp_path, range(5))
    reader = open_reader(tmp_path)
    searched = [reader.search("Compute", seconds=0).searched for _ in range(6)]
    # Each call searches one row group of 4 episodes per core, newest first.
    per_call = 4 * len(os.sched_getaffinity(0))
    assert searched == [min(20, per_call * (i + 1)) for i in range(6)]
    assert len(set(reader.search("Compute", seconds=0).ids.tolist())) == 20


def test_repeated_search_finds_text_of_the_oldest_episodes(tmp_path: Path) -> None:
    record_steps(tmp_path, range(5))
    reader = open_reader(tmp_path)
    oldest = [row["id"] for row in reader.summary_table.to_pylist() if row["step"] == 0]
    for _ in range(5):
        found = reader.search("print(2", seconds=0)
    assert set(oldest) <= set(found.ids.tolist())


def test_unknown_episode_is_none(tmp_path: Path) -> None:
    record_steps(tmp_path, [0])
    assert open_reader(tmp_path).read(99) is None
    assert open_reader(tmp_path).read(-1) is None


def test_nan_in_an_invalid_episode_is_recorded(tmp_path: Path) -> None:
    group = TrajectoryGroup("task", [], [failed("task")])
    group.invalid[0].rollout_log_probs[3] = np.nan
    with EpisodeRecorder(tmp_path, VOCABULARY, "all") as recorder:
        recorder.record(0, [SplitEpisodes("train", [group])])
    episode = open_reader(tmp_path).read(0)
    assert episode is not None and math.isnan(episode["rollout_log_probs"][3])
