"""Health checks report faults of a run and no false alarms."""

from typing import Any

import pytest

from launch.viewer.health import HealthFinding, check_health, classify_run
from rl_loop.tracking.signal_watch import SignalWatch


def records(steps: int = 40, **last: Any) -> list[dict[str, Any]]:
    """Return steps of a healthy run. ``last`` replaces values of the last ten steps."""
    healthy: dict[str, Any] = {
        "reward": 0.5,
        "mismatch/log_prob_gap_mean": 1e-5,
        "mismatch/drift": 1.0,
        "ratio/deviation_max": 0.0,
        "grad_norm": 0.4,
        "skipped_updates": 0.0,
        "entropy": 1.0,
        "rollout/zero_advantage_fraction": 0.2,
        "rollout/invalid_fraction/sandbox": 0.0,
        "rollout/invalid_fraction/engine": 0.0,
        "finish/length": 0.1,
        "seconds/step": 10.0,
    }
    made = []
    for step in range(1, steps + 1):
        changed = last if step > steps - 10 else {}
        made.append({"step": step, "time": 1000.0 + 10 * step, **healthy, **changed})
    return made


def find_finding(check: str, **last: Any) -> HealthFinding:
    (finding,) = [f for f in check_health(records(**last), is_on_policy=True) if f.check == check]
    return finding


def test_healthy_run_passes_every_check() -> None:
    findings = check_health(records(), is_on_policy=True)
    assert {finding.level for finding in findings} == {"good"}
    assert len(findings) == 9


@pytest.mark.parametrize(
    ("check", "last", "level", "message"),
    [
        ("numbers are finite", {"grad_norm": None}, "bad", "NaN or infinity in grad_norm"),
        ("importance ratio", {"ratio/deviation_max": 0.01}, "bad", "by up to 0.01"),
        ("engine and trainer", {"mismatch/drift": 3.0}, "warning", "3.0x"),
        ("engine and trainer", {"mismatch/drift": 9.0}, "bad", "9.0x"),
        ("gradient", {"skipped_updates": 1.0}, "warning", "10 updates"),
        ("gradient", {"grad_norm": 40.0}, "warning", "100x the usual 0.4"),
        ("entropy", {"entropy": 0.01}, "warning", "explores very little"),
        ("entropy", {"entropy": 9.0}, "warning", "random"),
        ("signal", {"rollout/zero_advantage_fraction": 1.0}, "bad", "100% of the tasks"),
        ("signal", {"rollout/zero_advantage_fraction": 0.9}, "warning", "90% of the tasks"),
        (
            "infrastructure",
            {"rollout/invalid_fraction/sandbox": 0.05},
            "warning",
            "most because of sandbox",
        ),
        (
            "infrastructure",
            {"rollout/invalid_fraction/engine": 0.5},
            "bad",
            "most because of engine",
        ),
        (
            "infrastructure",
            {
                "rollout/invalid_fraction/sandbox": 0.1,
                "rollout/invalid_fraction/sandbox/server_hung": 0.1,
            },
            "warning",
            "10.0% of the episodes",
        ),
        ("endings", {"finish/length": 0.8}, "warning", "most at length"),
        ("speed", {"seconds/step": 50.0}, "warning", "5.0x the usual"),
    ],
)
def test_health_check_reports_each_fault(
    check: str, last: dict[str, Any], level: str, message: str
) -> None:
    finding = find_finding(check, **last)
    assert finding.level == level
    assert message in finding.message


def test_worst_health_finding_comes_first() -> None:
    last = {"finish/length": 0.9, "ratio/deviation_max": 1.0}
    levels = [finding.level for finding in check_health(records(**last), is_on_policy=True)]
    assert levels[:3] == ["bad", "warning", "good"]


def test_a_ratio_is_free_to_deviate_off_policy() -> None:
    findings = check_health(records(**{"ratio/deviation_max": 0.2}), is_on_policy=False)
    assert "importance ratio" not in {finding.check for finding in findings}


def test_run_with_few_metrics_is_checked_on_these() -> None:
    checks = [
        finding.check for finding in check_health([{"step": 0, "loss": 2.0}], is_on_policy=True)
    ]
    assert checks == ["numbers are finite"]
    assert check_health([], is_on_policy=True) == []


@pytest.mark.parametrize(
    ("steps", "silent", "is_finished", "holder_is_alive", "state"),
    [
        (0, 0, False, None, "waiting"),
        (0, 0, False, False, "stopped"),
        (40, 30, False, None, "running"),
        (40, 30, False, True, "running"),
        (40, 30, False, False, "stopped"),
        (40, 700, False, True, "stalled"),
        (40, 700, False, None, "stopped"),
        (40, 9000, True, None, "finished"),
    ],
)
def test_run_state_is_derived_from_its_records(
    steps: int, silent: float, is_finished: bool, holder_is_alive: bool | None, state: str
) -> None:
    made = records(steps) if steps else []
    now = (made[-1]["time"] if made else 0.0) + silent
    found = classify_run(
        made, now, steps=40, is_finished=is_finished, holder_is_alive=holder_is_alive
    )
    assert found == state


def test_extended_run_is_not_finished() -> None:
    made = records(40)
    now = made[-1]["time"] + 5
    assert classify_run(made, now, steps=80, is_finished=True, holder_is_alive=True) == "running"


@pytest.mark.parametrize(("accuracy", "level"), [(0.0, "bad"), (1.0, "warning")])
def test_viewer_gives_the_advice_of_the_terminal(accuracy: float, level: str) -> None:
    last = {"rollout/zero_advantage_fraction": 1.0, "accuracy": accuracy, "finish/stop": 1.0}
    made = records(**last)
    (found,) = [finding for finding in check_health(made, True) if finding.check == "signal"]
    watch = SignalWatch(patience=1)
    said = watch.observe(made[-1], [0.0])
    assert said is not None
    assert found.level == level
    assert found.message.partition(": ")[2] == said.partition("steps: ")[2]
