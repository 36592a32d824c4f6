"""The last line of a run describes its changes."""

from __future__ import annotations

from pathlib import Path

from launch.progress import describe_outcome
from rl_loop.tracking.metrics import MetricName, MetricsWriter, StepMetrics
from rl_loop.tracking.run_directory import RunDirectory, start_run


def recorded(path: Path, *steps: dict[str, float]) -> RunDirectory:
    """Write a finished run with these metrics. Entries without a step time are evaluations."""
    run = start_run(path, "")
    writer = MetricsWriter(run)
    for number, values in enumerate(steps):
        metrics = StepMetrics(number)
        for name, value in values.items():
            metrics.add(name, value, "last")
        writer.write(metrics)
    writer.close()
    run.write_summary(steps=sum(MetricName.STEP_SECONDS in values for values in steps))
    return run


def test_rl_outcome_shows_held_out_accuracy_and_reward(
    tmp_path: Path,
) -> None:
    before = {MetricName.HELD_OUT_ACCURACY: 0.336, MetricName.HELD_OUT_REWARD: -0.328}
    after = {MetricName.HELD_OUT_ACCURACY: 0.867, MetricName.HELD_OUT_REWARD: 0.734}
    step = {MetricName.LOSS: 0.1, MetricName.STEP_SECONDS: 15.0}
    run = recorded(tmp_path / "run", before | step, step, after)
    assert describe_outcome(run) == (
        "held-out accuracy 0.336 -> 0.867, held-out reward -0.328 -> 0.734 in 2 steps, 0:30"
    )


def test_sft_outcome_shows_losses(tmp_path: Path) -> None:
    steps = [{MetricName.LOSS: 6.0 - i, MetricName.STEP_SECONDS: 1.0} for i in range(3)]
    steps[1][MetricName.VALIDATION_LOSS] = 5.5
    run = recorded(tmp_path / "run", *steps)
    assert describe_outcome(run) == (
        "loss 6.000 -> 4.000, validation loss 5.500 -> 5.500 in 3 steps, 0:03"
    )
