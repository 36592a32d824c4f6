"""Metrics: exact reductions over parts, and continued curves after a resume."""

import json
import math
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_loop.tracking.metrics import MetricName, MetricsWriter, StepMetrics
from rl_loop.tracking.run_directory import (
    RunDirectory,
    is_training_step,
    read_json,
    read_json_lines,
    start_run,
)


def test_mean_over_parts_is_weighted_by_their_tokens() -> None:
    metrics = StepMetrics(step=3)
    for gap_sum, tokens, worst, rate in ((6.0, 2, 5.0, 0.2), (2.0, 6, 1.0, 0.1)):
        metrics.add_mean("gap", gap_sum, tokens, over="tokens")
        metrics.add("tokens", tokens, "sum", "tokens")
        metrics.add("worst", worst, "max", "tokens")
        metrics.add("learning_rate", rate, "last")
    assert metrics.values() == {"gap": 1.0, "tokens": 8.0, "worst": 5.0, "learning_rate": 0.1}
    assert metrics.descriptions()["gap"] == "mean over tokens"


@pytest.mark.parametrize("order", [(1.0, math.nan), (math.nan, 1.0)])
def test_max_does_not_hide_a_nan(order: tuple[float, float]) -> None:
    metrics = StepMetrics(step=0)
    for value in order:
        metrics.add("highest", value, "max", "tokens")
    assert all(math.isnan(value) for value in metrics.values().values())


def test_mean_over_nothing_has_no_value() -> None:
    metrics = StepMetrics(step=0)
    metrics.add_mean("held_out/accuracy", 0.0, 0, over="sequences")
    assert metrics.values() == {}


def test_metric_with_two_reductions_is_an_error() -> None:
    metrics = StepMetrics(step=0)
    metrics.add_mean("reward", 1.0, 2, over="sequences")
    with pytest.raises(
        ValueError, match="reward was added as mean over sequences and as max over sequences"
    ):
        metrics.add("reward", 1.0, "max", "sequences")


def write_steps(writer: MetricsWriter, steps: range, value: float) -> None:
    for step in steps:
        metrics = StepMetrics(step)
        metrics.add("reward", value, "last")
        metrics.add(MetricName.STEP_SECONDS, 1.0, "last")
        writer.write(metrics)
    writer.close()


def tensorboard_curve(run: RunDirectory) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("reward")]


def test_outputs_get_equal_values_and_resume_drops_later_steps(
    tmp_path: Path,
) -> None:
    run = start_run(tmp_path / "run", "a: 1\n")
    write_steps(MetricsWriter(run), range(1, 6), value=1.0)
    with open(run.metrics, "a") as file:
        file.write('{"step": 6, "rew')  # a killed process leaves such a line

    # TensorBoard reads files in the order of their names, which begin with the time in seconds.
    # Within one second, the tenth file of a process comes before the ninth.
    time.sleep(1.1)
    heard: list[tuple[int, dict[str, float]]] = []
    resumed = MetricsWriter(
        run, resume_after=3, listeners=[lambda step, values: heard.append((step, values))]
    )
    write_steps(resumed, range(4, 6), value=2.0)

    expected = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
    assert [
        (record["step"], record["reward"]) for record in read_json_lines(run.metrics)
    ] == expected
    assert tensorboard_curve(run) == expected
    values = {"reward": 2.0, MetricName.STEP_SECONDS: 1.0}
    assert heard == [(4, values), (5, values)]
    described = dict.fromkeys(("reward", MetricName.STEP_SECONDS), "last over steps")
    assert read_json(run.metric_descriptions) == described


def test_resume_drops_the_evaluation_that_it_repeats(tmp_path: Path) -> None:
    run = start_run(tmp_path, "")
    writer = MetricsWriter(run)
    for step in range(3):
        evaluation = StepMetrics(step)
        evaluation.add("held_out/reward", 0.5, "last")
        writer.write(evaluation)
        trained = StepMetrics(step + 1)
        trained.add(MetricName.STEP_SECONDS, 1.0, "last")
        writer.write(trained)
    writer.close()
    MetricsWriter(run, resume_after=2).close()
    kept = [(r["step"], is_training_step(r)) for r in read_json_lines(run.metrics)]
    assert kept == [(0, False), (1, True), (1, False), (2, True)]


def test_non_finite_value_is_null_in_json(tmp_path: Path) -> None:
    run = start_run(tmp_path, "")
    writer = MetricsWriter(run)
    metrics = StepMetrics(0)
    metrics.add("grad_norm", math.inf, "last")
    writer.write(metrics)
    writer.close()
    assert json.loads(run.metrics.read_text(), parse_constant=pytest.fail)["grad_norm"] is None
