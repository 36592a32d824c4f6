"""The last line of a training command: what the run has changed."""

from launch.progress import format_seconds
from rl_loop.tracking.metrics import Name
from rl_loop.tracking.run_directory import RunDirectory, metric_curve, read_json, read_json_lines

COMPARED = {
    Name.HELD_OUT_ACCURACY: "held-out accuracy",
    Name.HELD_OUT_REWARD: "held-out reward",
    Name.LOSS: "loss",
    Name.VALIDATION_LOSS: "validation loss",
}
"""Metrics whose first and last values are told. The loss of RL says nothing, so it is told only where
there is no accuracy."""


def describe_outcome(run: RunDirectory) -> str:
    """Return what was first and last measured, and the time that training took: "held-out accuracy
    0.336 -> 0.867, held-out reward -0.328 -> 0.734 in 80 steps, 20:25"."""
    records = read_json_lines(run.metrics)
    changes: list[str] = []
    for metric, label in COMPARED.items():
        _, values = metric_curve(records, metric)
        if metric == Name.LOSS and changes:
            continue
        if values:
            changes.append(f"{label} {values[0]:.3f} -> {values[-1]:.3f}")

    summary = read_json(run.summary)
    seconds = sum(metric_curve(records, Name.STEP_SECONDS)[1])
    return f"{', '.join(changes)} in {summary['steps']} steps, {format_seconds(seconds)}"
