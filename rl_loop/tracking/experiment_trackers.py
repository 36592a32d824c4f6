"""Optional experiment trackers: Weights & Biases, Trackio and MLflow.

They receive the metrics of steps, the configuration, and some episodes as tables.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any, Protocol

import yaml

from rl_loop.config.errors import ConfigError
from rl_loop.tracking.episode_table import SampleRow
from rl_loop.tracking.run_directory import RunDirectory

logger = logging.getLogger(__name__)

SAMPLE_COLUMNS = [field.name for field in fields(SampleRow)]
MAX_PARAMETERS = 100
"""Maximum number of parameters per request to MLflow."""
MAX_FAILURES = 3
"""Consecutive failures after which MLflow is disabled. Each one may delay the loop by seconds."""


class ExperimentTracker(Protocol):
    """Service that shows the metrics of many runs."""

    def log_step(self, step: int, values: dict[str, float]) -> None:
        """Send the metrics of a step."""
        ...

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        """Send some episodes of a step as a table."""
        ...

    def close(self) -> None:
        """Send pending data and finish the run."""
        ...


class WandbTracker:
    """Tracker for Weights & Biases. A resumed run continues its earlier curves.

    The configuration is sent as a tree, so that runs can be filtered and grouped by key.
    """

    def __init__(self, run_name: str, config_yaml: str) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "WANDB_PROJECT is set, but wandb is not installed. Run pip install wandb, or "
                "unset the variable"
            ) from None
        self._table: Callable[..., Any] = wandb.Table
        config = yaml.safe_load(config_yaml)
        # With its name as id, a resumed run finds the earlier one.
        self._run: Any = wandb.init(
            name=run_name,
            id=run_name,
            resume="allow",
            config=config,
            tags=config["tracking"]["tags"],
        )

    def log_step(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        rows = [list(asdict(sample).values()) for sample in samples]
        self._run.log({"samples": self._table(columns=SAMPLE_COLUMNS, data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker(WandbTracker):
    """Tracker for Trackio, which has the interface of Weights & Biases.

    Trackio writes to a local directory, or to the server of TRACKIO_SERVER_URL or TRACKIO_SPACE_ID.
    """

    def __init__(self, run_name: str, config_yaml: str) -> None:
        try:
            import trackio
        except ImportError:
            raise ConfigError(
                "TRACKIO_PROJECT is set, but trackio is not installed. Run pip install trackio, or "
                "unset the variable"
            ) from None
        self._table = trackio.Table
        self._run = trackio.init(
            project=os.environ["TRACKIO_PROJECT"],
            name=run_name,
            resume="allow",
            config=yaml.safe_load(config_yaml),
            # Only the metrics of steps, as for the other trackers.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


class MlflowTracker:
    """Tracker for MLflow, with the experiment MLFLOW_EXPERIMENT_NAME.

    The configuration's values are parameters, and samples are artifacts. If the server fails, the
    run continues. The run's directory has all of the data.
    """

    def __init__(self, run_name: str, config_yaml: str, run: RunDirectory) -> None:
        """Start a run at MLflow. A resumed run continues the MLflow run that its directory names.

        Args:
            run_name: name of a new run.
            config_yaml: configuration.
            run: directory of the run.

        Raises:
            ConfigError: if a new run cannot be started.
        """
        # MLflow's defaults would retry for minutes and delay steps.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ConfigError(
                "MLFLOW_TRACKING_URI is set, but mlflow is not installed. Run pip install "
                "mlflow-skinny, or unset the variable"
            ) from None

        self._failures = 0
        try:
            self._client = MlflowClient()
            is_resumed = run.mlflow_run.exists()
            if is_resumed:
                self._id = run.mlflow_run.read_text().strip()
            else:
                self._id = self._begin(run_name, config_yaml, run)
        except Exception as error:
            # No step is lost at this point, so report a wrong address immediately.
            uri = os.environ.get("MLFLOW_TRACKING_URI")
            raise ConfigError(
                f"MLFLOW_TRACKING_URI is {uri}, but MLflow cannot start a run there: {error}"
            ) from None

        if is_resumed:
            # A resumed job must continue even if MLflow is not available.
            self._send(
                "the new state of the run (RUNNING)",
                lambda: self._client.update_run(self._id, status="RUNNING"),
            )

    def _begin(self, run_name: str, config_yaml: str, run: RunDirectory) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "gptoss")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        run_id: str = self._client.create_run(experiment_id, run_name=run_name).info.run_id

        parameters = [Param(key, str(value)) for key, value in _leaves(yaml.safe_load(config_yaml))]
        for first in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(run_id, params=parameters[first : first + MAX_PARAMETERS])
        self._client.log_text(run_id, config_yaml, "config.yaml")
        # Last, so that a resume does not continue a run of which only a part was created.
        run.mlflow_run.write_text(run_id)
        return run_id

    def log_step(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        # MLflow's unit is the millisecond.
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._send(
            f"metrics of step {step}", lambda: self._client.log_batch(self._id, metrics=metrics)
        )

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        rows = [list(asdict(sample).values()) for sample in samples]
        table = {"columns": SAMPLE_COLUMNS, "data": rows}
        file = f"samples/step_{step:06}.json"
        self._send(f"samples of step {step}", lambda: self._client.log_dict(self._id, table, file))

    def close(self) -> None:
        self._send("the end of the run", lambda: self._client.set_terminated(self._id))

    def _send(self, what: str, send: Callable[[], object]) -> None:
        """Send data. Log a failure, and stop sending after MAX_FAILURES consecutive failures."""
        if self._failures == MAX_FAILURES:
            return
        try:
            send()
        except Exception as error:
            # Stores of MLflow raise many types of exceptions.
            self._failures += 1
            logger.warning("MLflow did not accept %s: %s", what, error)
            if self._failures == MAX_FAILURES:
                logger.warning("MLflow is disabled. metrics.jsonl is still written")
            return
        self._failures = 0


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by dotted key."""
    for key, value in tree.items():
        # An empty section is a value.
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def experiment_trackers(
    run_name: str, config_yaml: str, run: RunDirectory
) -> list[ExperimentTracker]:
    """Create the trackers that WANDB_PROJECT, TRACKIO_PROJECT and MLFLOW_TRACKING_URI enable.

    Args:
        run_name: name of the run.
        config_yaml: configuration.
        run: directory of the run.

    Raises:
        ConfigError: if a tracker cannot be used.
    """
    trackers: list[ExperimentTracker] = []
    if "WANDB_PROJECT" in os.environ:
        trackers.append(WandbTracker(run_name, config_yaml))
    if "TRACKIO_PROJECT" in os.environ:
        trackers.append(TrackioTracker(run_name, config_yaml))
    if "MLFLOW_TRACKING_URI" in os.environ:
        trackers.append(MlflowTracker(run_name, config_yaml, run))
    return trackers
