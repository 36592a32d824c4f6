"""A run directory is never overwritten by accident and never left with a half-written file."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_loop.run_directory import (
    RunDirectoryError,
    RunWriteError,
    append_lines,
    atomic_write_text,
    episode_record,
    metric_curve,
    read_json,
    read_json_lines,
    start_run,
)
from rl_loop.trajectory import FinishReason, Trajectory, Turn


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """The operating system refuses to let any file grow past ``size`` bytes: a real failed write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_keeps_the_previous_file_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    atomic_write_text(path, "old")
    with (
        no_file_beyond(1000),
        pytest.raises(RunWriteError, match=r"could not write .*summary\.json.*--resume") as caught,
    ):
        atomic_write_text(path, "n" * 5000)
    assert caught.value.errno == errno.EFBIG
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_full_device_is_an_error_that_names_the_file() -> None:
    with pytest.raises(RunWriteError, match=r"could not write /dev/full: No space left on device"):
        append_lines(Path("/dev/full"), ["a line"])


def test_lines_that_do_not_fit_are_not_kept_in_part(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_lines(path, ['{"step": 0}'])
    with no_file_beyond(1000), pytest.raises(RunWriteError, match=r"metrics\.jsonl"):
        append_lines(path, ['{"step": 1}', '{"step": 2, "text": "' + "x" * 2000 + '"}'])
    assert path.read_text() == '{"step": 0}\n'


def test_a_second_run_over_the_first_is_refused_and_the_options_are_named(tmp_path: Path) -> None:
    run = start_run(tmp_path / "run", "lr: 1\n")
    append_lines(run.metrics, ['{"step": 0}'])
    with pytest.raises(RunDirectoryError, match=r"already holds a run \(1 steps\); add --resume .* or --overwrite"):
        start_run(run.path, "lr: 2\n")
    assert run.config.read_text() == "lr: 1\n"


def test_resume_keeps_the_run_and_starts_one_where_there_is_none(tmp_path: Path) -> None:
    run = start_run(tmp_path / "run", "lr: 1\n", resume=True)
    append_lines(run.metrics, ['{"step": 0}'])
    start_run(run.path, "lr: 1\n", resume=True)
    assert read_json_lines(run.metrics) == [{"step": 0}]


def test_overwrite_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    run = start_run(tmp_path / "run", "lr: 1\n")
    append_lines(run.metrics, ['{"step": 0}'])
    for checkpoints in (run.checkpoints, run.critic_checkpoints):
        (checkpoints / "step_1").mkdir(parents=True)
    (run.path / "notes.txt").write_text("mine")
    start_run(run.path, "lr: 2\n", overwrite=True)
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "notes.txt"]
    assert run.config.read_text() == "lr: 2\n"


def test_a_run_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("")
    with pytest.raises(RunDirectoryError, match=r"run is a file"):
        start_run(path, "")


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step":\n{"step": 2}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl, line 2 is not JSON"):
        read_json_lines(path)


def test_summary_figures_are_added_to_those_already_there(tmp_path: Path) -> None:
    run = start_run(tmp_path, "")
    run.write_summary(held_out_accuracy_sft=0.5)
    run.write_summary(held_out_accuracy_rl=0.9)
    assert read_json(run.summary) == {"held_out_accuracy_sft": 0.5, "held_out_accuracy_rl": 0.9}


def test_a_curve_has_only_the_steps_that_measured_it() -> None:
    records = [{"step": 0, "accuracy": 0.5}, {"step": 1}, {"step": 2, "accuracy": None}, {"step": 3, "accuracy": 1}]
    assert metric_curve(records, "accuracy") == ([0, 3], [0.5, 1.0])


def test_an_episode_record_has_log_probs_on_sampled_tokens_only() -> None:
    trajectory = Trajectory(
        task_id="sum-1",
        token_ids=[7, 8, 9],
        loss_mask=[0, 1, 1],
        rollout_log_probs=[0.0, -0.5, -0.25],
        turns=[Turn("prompt", 0, 1, "<7>"), Turn("assistant", 1, 3, "<8><9>")],
        finish_reason=FinishReason.STOP,
        reward=1.0,
        reward_parts={"correct": 1.0},
    )
    record = episode_record(trajectory, lambda i: f"<{i}>", step=4)
    assert record["tokens"] == [
        {"text": "<7>", "mask": 0},
        {"text": "<8>", "mask": 1, "logprob": -0.5},
        {"text": "<9>", "mask": 1, "logprob": -0.25},
    ]
    assert record["finish_reason"] == "stop"
    assert record["turns"][1] == {"role": "assistant", "start": 1, "end": 3, "text": "<8><9>"}
