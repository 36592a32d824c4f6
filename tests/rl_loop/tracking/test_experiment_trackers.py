"""Metrics sent to Weights & Biases, Trackio and MLflow.

The library of wandb is mocked, because it reports to its own service. Trackio and MLflow are real,
with their stores in a directory, if they are installed: pip install trackio mlflow-skinny.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_loop.config.errors import ConfigError
from rl_loop.config.load import dump_config, load_config
from rl_loop.config.run import RlConfig
from rl_loop.config.training import TrackingConfig
from rl_loop.tracking.episode_recorder import EpisodeRecorder
from rl_loop.tracking.episode_table import SampleRow
from rl_loop.tracking.experiment_trackers import (
    SAMPLE_COLUMNS,
    MlflowTracker,
    WandbTracker,
    experiment_trackers,
)
from rl_loop.tracking.metrics import MetricsWriter
from rl_loop.tracking.recorder import StepRecorder
from rl_loop.tracking.run_directory import RunDirectory
from tests.support.recorded_episodes import VOCABULARY, groups_of_step
from tests.support.rl_loop.scripted_loop import Silent

CONFIG = Path(__file__).parents[3] / "configs/rl/tiny_retool.yaml"
SAMPLE = SampleRow(3, "train", "a-1", 0.5, "stop", "42", "[prompt] What?\n[assistant] 42")


@pytest.fixture
def config() -> RlConfig:
    return load_config(CONFIG, RlConfig)


def test_wandb_gets_nested_config_metrics_by_step_and_a_table(
    config: RlConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[str, Any] = {}
    logged: list[tuple[int, dict[str, Any]]] = []
    run = SimpleNamespace(
        log=lambda values, step: logged.append((step, values)),
        finish=lambda: logged.append((-1, {})),
    )
    library = SimpleNamespace(
        init=lambda **options: begun.update(options) or run,
        Table=lambda columns, data: (columns, data),
    )
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setenv("WANDB_PROJECT", "x")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    config = config.model_copy(update={"tracking": TrackingConfig(tags=["baseline"])})
    (tracker,) = experiment_trackers("tiny", dump_config(config), RunDirectory(Path("none")))
    assert isinstance(tracker, WandbTracker)
    assert begun["tags"] == ["baseline"]
    tracker.log_samples(3, [SAMPLE])
    tracker.log_step(3, {"reward": 0.5})
    tracker.close()

    assert begun["config"]["optimizer"]["lr"] == config.optimizer.lr
    assert begun["config"]["rollout"]["samples_per_task"] == config.rollout.samples_per_task
    assert (begun["id"], begun["resume"]) == ("tiny", "allow")
    row = [3, "train", "a-1", 0.5, "stop", "42", "[prompt] What?\n[assistant] 42"]
    assert logged == [(3, {"samples": (SAMPLE_COLUMNS, [row])}), (3, {"reward": 0.5}), (-1, {})]


def test_trackio_gets_metrics_and_samples_over_a_resume(
    config: RlConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("TRACKIO_PROJECT", "words")
    # The package reads its variables when it is imported, so it runs in processes of its own.
    code = f"""
import sys
from pathlib import Path
from rl_loop.tracking.episode_table import SampleRow
from rl_loop.tracking.experiment_trackers import experiment_trackers
from rl_loop.tracking.run_directory import RunDirectory

config = Path({str(tmp_path / "config.yaml")!r}).read_text()
(tracker,) = experiment_trackers("tiny", config, RunDirectory(Path("none")))
step = int(sys.argv[1])
tracker.log_step(step, {{"reward": step / 4, "loss": float("nan")}})
tracker.log_samples(step, [{SAMPLE!r}])
tracker.close()
"""
    (tmp_path / "config.yaml").write_text(dump_config(config))
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1"}
    for step in (1, 2):
        subprocess.run([sys.executable, "-c", code, str(step)], env=environment, check=True)
    read = """
import json
import trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("words")
logs = SQLiteStorage.get_logs("words", run.name)
print(json.dumps([run.name, run.config["optimizer"]["lr"], logs]))
"""
    shown = subprocess.run(
        [sys.executable, "-c", read], env=environment, check=True, capture_output=True, text=True
    )
    name, rate, history = json.loads(shown.stdout.splitlines()[-1])
    assert (name, rate) == ("tiny", config.optimizer.lr)
    rewards = {row["step"]: row["reward"] for row in history if "reward" in row}
    assert rewards == {1: 0.25, 2: 0.5}
    assert any("samples" in row for row in history)


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Create a store in a directory. Return its MLflow client."""
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "words")
    return tracking.MlflowClient()


def test_mlflow_gets_parameters_metrics_samples_over_a_resume(
    config: RlConfig, tmp_path: Path, mlflow_store: Any
) -> None:
    run = RunDirectory(tmp_path)
    first = MlflowTracker("tiny", dump_config(config), run)
    first.log_step(0, {"reward": -1.0, "mismatch/log_prob_gap_mean": 1e-7})
    first.log_samples(3, [SAMPLE])
    first.close()

    resumed = MlflowTracker("tiny", dump_config(config), run)
    resumed.log_step(1, {"reward": 0.5, "loss": float("nan")})

    (identity,) = [path.read_text() for path in tmp_path.glob("mlflow_run_id")]
    data = mlflow_store.get_run(identity).data
    assert data.params["optimizer.lr"] == str(config.optimizer.lr)
    assert data.params["rollout.samples_per_task"] == str(config.rollout.samples_per_task)
    curve = mlflow_store.get_metric_history(identity, "reward")
    assert [(point.step, point.value) for point in curve] == [(0, -1.0), (1, 0.5)]
    assert data.metrics["mismatch/log_prob_gap_mean"] == 1e-7
    assert mlflow_store.get_run(identity).info.status == "RUNNING"

    downloaded = mlflow_store.download_artifacts(identity, "samples/step_000004.json", tmp_path)
    table = json.loads(Path(downloaded).read_text())
    assert table["columns"] == SAMPLE_COLUMNS
    assert table["data"][0][2:4] == ["a-1", 0.5]
    resumed.close()
    assert mlflow_store.get_run(identity).info.status == "FINISHED"


def test_failing_tracker_is_an_error_only_at_the_start_of_a_run(
    config: RlConfig,
    tmp_path: Path,
    mlflow_store: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker = MlflowTracker("tiny", dump_config(config), RunDirectory(tmp_path))

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("the server is away")

    monkeypatch.setattr(type(tracker._client), "log_batch", fail)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            tracker.log_step(step, {"reward": 0.0})
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings[0] == "MLflow did not accept metrics of step 1: the server is away"
    assert len(warnings) == 4 and warnings[-1].startswith("MLflow is disabled")

    # A resumed job continues without MLflow, but a new run fails at its start.
    monkeypatch.setattr(type(tracker._client), "update_run", fail)
    with caplog.at_level(logging.WARNING):
        MlflowTracker("tiny", dump_config(config), RunDirectory(tmp_path))
    resumed = "MLflow did not accept the new state of the run (RUNNING): the server is away"
    assert caplog.records[-1].getMessage() == resumed

    (tmp_path / "mlflow_run_id").unlink()
    with pytest.raises(ConfigError, match=r"MLFLOW_TRACKING_URI is file:.*the server is away"):
        MlflowTracker("tiny", dump_config(config), RunDirectory(tmp_path))


def test_samples_of_a_step_are_sent_as_readable_text(tmp_path: Path) -> None:
    sent: list[tuple[int, list[SampleRow]]] = []
    tracker = SimpleNamespace(log_samples=lambda step, samples: sent.append((step, samples)))
    run = RunDirectory(tmp_path)
    groups = groups_of_step(3)
    writer = MetricsWriter(run)

    with EpisodeRecorder(run.episodes, VOCABULARY, 0) as episodes:
        recorder = StepRecorder(run, writer, Silent(), episodes, [tracker], samples=2, steps=1)
        recorder.record_evaluation(recorder.begin_step(3), groups)
    writer.close()

    ((step, samples),) = sent
    assert step == 3
    assert [sample.split for sample in samples] == ["held_out", "held_out"]
    first = groups[0].trajectories[0]
    assert samples[0].task_id == first.task_id
    assert samples[0].reward == first.reward
    for turn in first.turns:
        assert f"[{turn.role}] {turn.text}" in samples[0].text
