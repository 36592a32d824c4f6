"""Services that show many runs side by side, if they are asked for: Weights & Biases and MLflow. They
get the metrics of steps, the configuration, and a few episodes as tables."""

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
MOST_PARAMETERS = 100
"""Of a request to MLflow."""
MOST_FAILURES = 3
"""Requests in a row after which MLflow is given up: each may cost the loop some seconds."""


class ExperimentTracker(Protocol):
    """A service that shows many runs side by side."""

    def log_step(self, step: int, values: dict[str, float]) -> None:
        """Take the metrics of a step."""
        ...

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        """Take a few episodes of a step, as a table."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class WandbTracker:
    """The same curves at Weights & Biases; a resumed run continues its own. The configuration goes
    there as a tree, so that runs can be filtered and grouped by its keys."""

    def __init__(self, run_name: str, config_yaml: str) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "WANDB_PROJECT is set, but wandb is not installed: pip install wandb, or unset it"
            ) from None
        self._table: Callable[..., Any] = wandb.Table
        self._run: Any = wandb.init(
            name=run_name, id=run_name, resume="allow", config=yaml.safe_load(config_yaml)
        )

    def log_step(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        rows = [list(asdict(sample).values()) for sample in samples]
        self._run.log({"samples": self._table(columns=SAMPLE_COLUMNS, data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """The same curves at MLflow, in the experiment MLFLOW_EXPERIMENT_NAME.

    The configuration's values are its parameters, samples are artifacts. A server that does not
    answer ends no run: what is lost there is in the run's own directory."""

    def __init__(self, run_name: str, config_yaml: str, run: RunDirectory) -> None:
        """A resumed run continues the one that its directory names. Raises ConfigError if a new one
        cannot be begun."""
        # MLflow would try for minutes, and steps would wait.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ConfigError(
                "MLFLOW_TRACKING_URI is set, but mlflow is not installed: pip install mlflow-skinny, or unset it"
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
            # Nothing has been trained yet, so a wrong address is best mended now.
            uri = os.environ.get("MLFLOW_TRACKING_URI")
            raise ConfigError(
                f"MLFLOW_TRACKING_URI is {uri}, and no run can be begun there: {error}"
            ) from None

        if is_resumed:
            # A job that is queued again at night goes on without it.
            self._try(
                "that the run goes on",
                lambda: self._client.update_run(self._id, status="RUNNING"),
            )

    def _begin(self, run_name: str, config_yaml: str, run: RunDirectory) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "gptoss")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        identity: str = self._client.create_run(experiment_id, run_name=run_name).info.run_id

        parameters = [Param(key, str(value)) for key, value in _leaves(yaml.safe_load(config_yaml))]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(identity, params=parameters[first : first + MOST_PARAMETERS])
        self._client.log_text(identity, config_yaml, "config.yaml")
        run.mlflow_run.write_text(identity)
        return identity

    def log_step(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._try(
            f"metrics of step {step}", lambda: self._client.log_batch(self._id, metrics=metrics)
        )

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        rows = [list(asdict(sample).values()) for sample in samples]
        table = {"columns": SAMPLE_COLUMNS, "data": rows}
        file = f"samples/step_{step:06}.json"
        self._try(f"samples of step {step}", lambda: self._client.log_dict(self._id, table, file))

    def close(self) -> None:
        self._try("that the run has ended", lambda: self._client.set_terminated(self._id))

    def _try(self, what: str, send: Callable[[], object]) -> None:
        """Send something; warn where it fails, and give up after MOST_FAILURES in a row."""
        if self._failures == MOST_FAILURES:
            return
        try:
            send()
        except Exception as error:
            # Its stores raise all sorts of things.
            self._failures += 1
            logger.warning("MLflow did not take %s: %s", what, error)
            if self._failures == MOST_FAILURES:
                logger.warning("MLflow is given up; metrics.jsonl goes on")
            return
        self._failures = 0


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree of mappings by dotted key."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def experiment_trackers(
    run_name: str, config_yaml: str, run: RunDirectory
) -> list[ExperimentTracker]:
    """Make the trackers that are switched on by variables of their own: WANDB_PROJECT,
    MLFLOW_TRACKING_URI. Raises ConfigError for one that cannot be used."""
    trackers: list[ExperimentTracker] = []
    if "WANDB_PROJECT" in os.environ:
        trackers.append(WandbTracker(run_name, config_yaml))
    if "MLFLOW_TRACKING_URI" in os.environ:
        trackers.append(MlflowTracker(run_name, config_yaml, run))
    return trackers
