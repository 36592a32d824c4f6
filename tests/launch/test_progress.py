"""The progress display: a live display on a terminal, one line per step in a log."""

import io

from rich.console import Console

from launch.progress import TrainingProgress, format_seconds
from rl_loop.tracking.metrics import MetricName

VALUES = {
    MetricName.REWARD: 0.5,
    MetricName.TOKENS_PER_SECOND: 1234.0,
    MetricName.LOG_PROB_GAP: 2e-6,
    MetricName.CLIP_FRACTION: 0.0,
}


def run_two_steps(terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100, color_system=None)
    with TrainingProgress("RL · [tiny]", total_steps=4, first_step=1, console=console) as progress:
        progress.phase("rollout")
        progress.step(2, VALUES)
        progress.note("saved runs/tiny/[1]")
        progress.step(3, VALUES | {MetricName.REWARD: 0.75})
    return output.getvalue()


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    said = run_two_steps(terminal=False)
    assert said.endswith("left 0:00\n")
    lines = [line.partition("  left ")[0] for line in said.splitlines()]
    assert lines == [
        "step 2/4  reward 0.500  tokens/s 1,234  |Δlogp| 2.0e-06  clipped 0.000",
        "saved runs/tiny/[1]",
        "step 3/4  reward 0.750  tokens/s 1,234  |Δlogp| 2.0e-06  clipped 0.000",
    ]
    assert "\x1b" not in "".join(lines)


def test_on_a_terminal_the_display_shows_step_phase_and_metrics() -> None:
    output = run_two_steps(terminal=True)
    last = output[output.rindex("RL · [tiny]") :]
    for part in ("step 3/4", "done", "reward 0.750", "tokens/s 1,234", "|Δlogp| 2.0e-06", "left"):
        assert part in last
    assert "saved runs/tiny/[1]" in output
    assert "step 2/4  reward" not in output  # the log lines are not printed in addition


def test_only_rollout_counts_episodes_on_a_terminal() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100, color_system=None)
    with TrainingProgress("RL", total_steps=2, console=console) as progress:
        progress.phase("rollout")
        progress.episodes(312, 1512)
        progress._display.refresh()
        progress.phase("train")
        progress.episodes(1, 1512)
        progress._display.refresh()
    assert "rollout 312/1,512 episodes" in output.getvalue()
    assert "1/1,512" not in output.getvalue()


def test_non_finite_value_is_shown_without_an_error() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100, color_system=None)
    with TrainingProgress("RL", total_steps=2, console=console) as progress:
        progress.step(1, {MetricName.REWARD: float("nan"), MetricName.GRAD_NORM: float("inf")})
    assert "reward nan" in output.getvalue()
    assert "grad norm inf" in output.getvalue()


def test_the_clock_shows_hours_only_when_there_are_some() -> None:
    assert [format_seconds(s) for s in (-3, 61, 3661)] == ["0:00", "1:01", "1:01:01"]


def test_progress_shows_evaluations_at_completed_steps() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    with TrainingProgress("RL", total_steps=1, console=console) as progress:
        progress.step(0, {MetricName.HELD_OUT_ACCURACY: 0.1})
        progress.step(1, {MetricName.REWARD: 0.5})
        progress.step(1, {MetricName.HELD_OUT_ACCURACY: 0.9})
    assert console.file.getvalue().splitlines() == [
        "step 0/1  held-out accuracy 0.100",
        "step 1/1  reward 0.500  left 0:00",
        "step 1/1  held-out accuracy 0.900  left 0:00",
    ]
