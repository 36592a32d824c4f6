"""Run directories: protection against overwriting, incomplete files, and concurrent runs."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_gptoss.new_directory import OLD, PARTIAL
from rl_loop.tracking.run_directory import (
    RunDirectory,
    RunDirectoryError,
    RunWriteError,
    StartMode,
    append_lines,
    atomic_write_text,
    check_start,
    metric_curve,
    read_json,
    read_json_lines,
    start_run,
)
from rl_loop.tracking.run_lock import RunLockedError, locked_run
from tests.support.rl_loop.tracking.full_disk import no_file_beyond


def test_failed_write_keeps_the_previous_file_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    atomic_write_text(path, "old")
    with (
        no_file_beyond(1000),
        pytest.raises(
            RunWriteError, match=r"summary\.json could not be written.*--resume"
        ) as caught,
    ):
        atomic_write_text(path, "n" * 5000)
    assert caught.value.errno == errno.EFBIG
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_full_device_is_an_error_that_names_the_file() -> None:
    with pytest.raises(
        RunWriteError, match=r"/dev/full could not be written: No space left on device"
    ):
        append_lines(Path("/dev/full"), ["a line"])


def test_append_that_does_not_fit_leaves_no_partial_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_lines(path, ['{"step": 0}'])
    with no_file_beyond(1000), pytest.raises(RunWriteError, match=r"metrics\.jsonl"):
        append_lines(path, ['{"step": 1}', '{"step": 2, "text": "' + "x" * 2000 + '"}'])
    assert path.read_text() == '{"step": 0}\n'


def test_run_in_a_used_directory_is_rejected_with_the_options(tmp_path: Path) -> None:
    run = start_run(tmp_path / "run", "lr: 1\n")
    append_lines(
        run.metrics, ['{"step": 0, "seconds/step": 0.5}', '{"step": 1, "held_out/reward": 1}']
    )
    with pytest.raises(
        RunDirectoryError, match=r"already has a run \(1 steps\)\. Add --resume .* or --overwrite"
    ):
        start_run(run.path, "lr: 2\n")
    assert run.config.read_text() == "lr: 1\n"


def test_resume_keeps_the_run(tmp_path: Path) -> None:
    run = start_run(tmp_path / "run", "lr: 1\n", StartMode.RESUME_OR_NEW)
    append_lines(run.metrics, ['{"step": 0}'])
    for how in (StartMode.RESUME, StartMode.RESUME_OR_NEW):
        start_run(run.path, "lr: 1\n", how)
        assert read_json_lines(run.metrics) == [{"step": 0}]


def test_resume_of_a_mistyped_name_starts_no_run(tmp_path: Path) -> None:
    start_run(tmp_path / "tiny_retool", "")
    with pytest.raises(
        RunDirectoryError,
        match=r"tiny_retol: there is no run to resume; did you mean name=tiny_retool",
    ):
        start_run(tmp_path / "tiny_retol", "", StartMode.RESUME)
    with pytest.raises(
        RunDirectoryError, match=r"no run to resume; runs in .*: tiny_retool\. Leave --resume out"
    ):
        start_run(tmp_path / "gsm8k", "", StartMode.RESUME)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny_retool"]


def test_files_of_a_failed_start_are_not_a_run(tmp_path: Path) -> None:
    for name in ("run.lock", "error.log", "output.log"):
        (tmp_path / name).touch()
    run = start_run(tmp_path, "lr: 1\n")
    assert not run.has_begun

    run.tensorboard.mkdir()
    append_lines(run.rejected, ["{}"])
    start_run(tmp_path, "lr: 2\n")
    assert run.config.read_text() == "lr: 2\n"
    assert run.existing() == [run.config], "what the first start wrote is of another configuration"


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "episodes", "export"])
def test_output_of_a_step_makes_a_directory_a_run(tmp_path: Path, name: str) -> None:
    run = start_run(tmp_path, "lr: 1\n")
    (tmp_path / name).touch()
    assert run.has_begun
    with pytest.raises(RunDirectoryError, match="already has a run"):
        check_start(tmp_path, StartMode.NEW)


def test_locked_run_is_rejected_with_the_name_of_its_holder(tmp_path: Path) -> None:
    with locked_run(tmp_path):
        holder = rf"process {os.getpid()} on {re.escape(socket.gethostname())} since \d{{4}}-"
        with (
            pytest.raises(RunLockedError, match=rf"is in use by {holder}.*another name"),
            locked_run(tmp_path),
        ):
            pass
    with locked_run(tmp_path):
        pass


def test_attempt_waits_for_the_lock_of_the_previous_one(tmp_path: Path) -> None:
    holder = locked_run(tmp_path)
    holder.__enter__()
    leaving = threading.Timer(0.5, holder.__exit__, (None, None, None))
    leaving.start()
    with locked_run(tmp_path, wait_seconds=60):
        assert not leaving.is_alive() or leaving.finished.is_set()


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from rl_loop.tracking.run_lock import locked_run
with locked_run(Path({str(tmp_path / "run")!r})):
    print("locked", flush=True)
    time.sleep(600)
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    with (
        pytest.raises(RunLockedError, match=f"process {holder.pid} "),
        locked_run(tmp_path / "run"),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked_run(tmp_path / "run"):
        pass


def test_directory_of_a_failed_lock_body_is_removed_if_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError), locked_run(tmp_path / "a/b"):
        raise ValueError
    assert list(tmp_path.iterdir()) == []
    with locked_run(tmp_path / "a/b"):
        (tmp_path / "a/b/config.yaml").touch()
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == ["config.yaml", "run.lock"]


def test_overwrite_deletes_only_the_run(tmp_path: Path) -> None:
    run = start_run(tmp_path / "run", "lr: 1\n")
    append_lines(run.metrics, ['{"step": 0}'])
    for checkpoints in (run.checkpoints, run.critic_checkpoints):
        (checkpoints / "step_1").mkdir(parents=True)
    # Killed exports leave such folders. The next export would rename the OLD one back.
    for final in (run.export, run.adapter):
        for suffix in (PARTIAL, OLD):
            final.with_name(final.name + suffix).mkdir()
    (run.adapters / "step_000001").mkdir(parents=True)
    half_written = run.adapters / f"step_000002{PARTIAL}"
    half_written.mkdir()
    exports = [run.path / "export.partial", run.path / "adapter.partial"]
    assert run.unfinished() == [half_written, *exports]
    (run.path / "notes.txt").write_text("mine")
    start_run(run.path, "lr: 2\n", StartMode.OVERWRITE)
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "notes.txt"]
    assert run.config.read_text() == "lr: 2\n"


def test_adapters_of_later_steps_are_deleted_by_number(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.delete_adapters_after(0)
    for name in ("step_000002", "step_000010", f"step_000010{OLD}", "step_by_hand"):
        (run.adapters / name).mkdir(parents=True)
    run.delete_adapters_after(2)
    left = sorted(path.name for path in run.adapters.iterdir())
    assert left == ["step_000002", "step_by_hand"]


def test_run_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("")
    with pytest.raises(RunDirectoryError, match=r"run is a file"):
        start_run(path, "")


def test_broken_line_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step":\n{"step": 2}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl, line 2 is not JSON"):
        read_json_lines(path)


def test_write_summary_keeps_earlier_values(tmp_path: Path) -> None:
    run = start_run(tmp_path, "")
    run.write_summary(held_out_accuracy_sft=0.5)
    run.write_summary(held_out_accuracy_rl=0.9)
    assert read_json(run.summary) == {"held_out_accuracy_sft": 0.5, "held_out_accuracy_rl": 0.9}


def test_metric_curve_has_only_the_steps_with_a_value() -> None:
    records = [
        {"step": 0, "accuracy": 0.5},
        {"step": 1},
        {"step": 2, "accuracy": None},
        {"step": 3, "accuracy": 1},
    ]
    assert metric_curve(records, "accuracy") == ([0, 3], [0.5, 1.0])
