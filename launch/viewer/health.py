"""Health checks of a run as pure functions of its metrics, with texts for the user."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rl_loop.tracking.metrics import MetricName
from rl_loop.tracking.signal_watch import explain_no_signal

Level = Literal["good", "warning", "bad"]
Records = Sequence[dict[str, Any]]
"""Lines of metrics.jsonl, in which null represents NaN and infinity."""

RECENT = 10
"""Number of latest steps that are checked for rare events."""

FIRST = 10
"""Number of first steps with which later steps are compared."""


@dataclass(frozen=True)
class HealthFinding:
    """Result of one check."""

    level: Level
    check: str
    """Short name of the check."""
    message: str
    """Result, and a remedy if there is a problem."""
    metric: str | None = None
    """Metric whose curve shows the problem."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_health(records: Records, is_on_policy: bool) -> list[HealthFinding]:
    """Run all checks and return their findings, the worst first.

    Args:
        records: lines of metrics.jsonl.
        is_on_policy: whether the configuration trains on every token once, with the weights that
            sampled it.
    """
    if not records:
        return []
    findings = [check(records) for check in CHECKS]
    findings.append(_ratio(records, is_on_policy))
    order: list[Level] = ["bad", "warning", "good"]
    present = [finding for finding in findings if finding is not None]
    return sorted(present, key=lambda finding: order.index(finding.level))


def _values(records: Records, name: str) -> list[float]:
    # NaN and infinity are null in the file. They have no place in means and medians.
    return [float(record[name]) for record in records if record.get(name) is not None]


def _finite(records: Records) -> HealthFinding | None:
    last = records[-1]
    lost = sorted(name for name, value in last.items() if value is None)
    if lost:
        return HealthFinding(
            "bad",
            "numbers are finite",
            f"step {last['step']}: NaN or infinity in {', '.join(lost[:5])}",
            lost[0],
        )
    return HealthFinding("good", "numbers are finite", "no NaN in the newest step")


def _ratio(records: Records, is_on_policy: bool) -> HealthFinding | None:
    name = "ratio/deviation_max"
    deviations = _values(records, name)
    if not deviations or not is_on_policy:
        return None
    # Any deviation is a fault: on-policy, both log-probs come from the same computation.
    if max(deviations) > 0:
        return HealthFinding(
            "bad",
            "importance ratio",
            f"deviates from 1 by up to {max(deviations):.2g}, but the run is on-policy",
            name,
        )
    return HealthFinding("good", "importance ratio", "exactly 1 in every step", name)


def _mismatch(records: Records) -> HealthFinding | None:
    gaps = _values(records, MetricName.LOG_PROB_GAP)
    if not gaps:
        return None
    # The median ignores a single step with long or unusual episodes.
    drifts = _values(records[-RECENT:], "mismatch/drift")
    drift = statistics.median(drifts) if drifts else 1.0
    message = f"engine and trainer differ by {gaps[-1]:.2g} nats per token"
    if drift > 2:
        message += (
            f", {drift:.1f}x the value of the first {FIRST} steps. See docs/algorithms.md on "
            "corrections"
        )
    level: Level = "good"
    if drift > 2:
        level = "warning"
    if drift > 5:
        level = "bad"
    return HealthFinding(level, "engine and trainer", message, MetricName.LOG_PROB_GAP)


def _gradient(records: Records) -> HealthFinding | None:
    norms = _values(records, MetricName.GRAD_NORM)
    if not norms:
        return None
    skipped = sum(_values(records[-RECENT:], "skipped_updates"))
    # The last 50 norms, because the usual norm changes during training.
    usual = statistics.median(norms[-50:])
    if skipped > 0:
        message = f"{skipped:.0f} updates of the last {RECENT} steps were skipped"
        return HealthFinding("warning", "gradient", message, "skipped_updates")
    if usual > 0 and norms[-1] > 10 * usual:
        message = f"norm {norms[-1]:.3g}, {norms[-1] / usual:.0f}x the usual {usual:.3g}"
        return HealthFinding("warning", "gradient", message, MetricName.GRAD_NORM)
    return HealthFinding(
        "good", "gradient", f"norm {norms[-1]:.3g}, as usual", MetricName.GRAD_NORM
    )


def _entropy(records: Records) -> HealthFinding | None:
    entropies = _values(records, MetricName.ENTROPY)
    # The two windows must not overlap.
    if len(entropies) < 2 * FIRST:
        return None
    before = statistics.fmean(entropies[:FIRST])
    now = statistics.fmean(entropies[-FIRST:])
    message = f"{now:.3g} nats per token, {before:.3g} in the first {FIRST} steps"
    if before > 0 and now < 0.1 * before:
        message += ". The policy explores very little"
        return HealthFinding("warning", "entropy", message, MetricName.ENTROPY)
    if before > 0 and now > 3 * before:
        message += ". The policy becomes random"
        return HealthFinding("warning", "entropy", message, MetricName.ENTROPY)
    return HealthFinding("good", "entropy", message, MetricName.ENTROPY)


def _signal(records: Records) -> HealthFinding | None:
    shares = _values(records[-RECENT:], MetricName.ZERO_ADVANTAGE_FRACTION)
    if not shares:
        return None
    mean = statistics.fmean(shares)
    message = f"{mean:.0%} of the tasks in the last {len(shares)} steps gave no learning signal"
    newest = next(
        record for record in reversed(records) if MetricName.ZERO_ADVANTAGE_FRACTION in record
    )
    measured = {name: value for name, value in newest.items() if value is not None}
    solves = measured.get(MetricName.ACCURACY, 0.0)
    if mean == 1:
        message += f": {explain_no_signal(measured)}"
        # Solving every task is no fault, although such a step has no learning signal.
        level: Level = "warning" if solves >= 1 else "bad"
        return HealthFinding(level, "signal", message, MetricName.ZERO_ADVANTAGE_FRACTION)
    if mean > 0.8:
        tasks = "harder" if solves > 0.5 else "easier"
        message += f". Use {tasks} tasks or algorithm.dynamic_sampling_rounds"
        return HealthFinding("warning", "signal", message, MetricName.ZERO_ADVANTAGE_FRACTION)
    return HealthFinding("good", "signal", message, MetricName.ZERO_ADVANTAGE_FRACTION)


def _infrastructure(records: Records) -> HealthFinding | None:
    newest = records[-RECENT:]
    prefix = "rollout/invalid_fraction/"
    found = {name for record in newest for name in record if name.startswith(prefix)}
    # Metrics with a further "/" are parts of a component's share.
    names = sorted(name for name in found if "/" not in name.removeprefix(prefix))
    if not names:
        return None
    lost = {name: statistics.fmean(_values(newest, name) or [0.0]) for name in names}
    worst = max(lost, key=lambda name: lost[name])
    total = sum(lost.values())
    if total == 0:
        return HealthFinding("good", "infrastructure", "no episode failed because of it", worst)
    message = f"{total:.1%} of the episodes failed, most because of {worst.removeprefix(prefix)}"
    return HealthFinding("bad" if total > 0.2 else "warning", "infrastructure", message, worst)


def _endings(records: Records) -> HealthFinding | None:
    newest = records[-RECENT:]
    limits = ("length", "max_episode_tokens", "max_sampled_tokens", "max_turns", "max_tool_calls")
    shares = {
        limit: statistics.fmean(_values(newest, f"finish/{limit}") or [0]) for limit in limits
    }
    # Supervised runs have no episodes.
    if not any(f"finish/{limit}" in record for record in newest for limit in limits):
        return None
    total = sum(shares.values())
    worst = max(shares, key=lambda limit: shares[limit])
    message = f"{total:.0%} of the episodes end at a limit"
    if total > 0.5:
        return HealthFinding("warning", "endings", f"{message}, most at {worst}", f"finish/{worst}")
    return HealthFinding("good", "endings", message, f"finish/{worst}")


def _speed(records: Records) -> HealthFinding | None:
    seconds = _values(records, MetricName.STEP_SECONDS)
    if len(seconds) < 2 * FIRST:
        return None
    # Medians, because evaluations and checkpoints make single steps longer.
    usual = statistics.median(seconds)
    now = statistics.median(seconds[-5:])
    message = f"a step takes {now:.3g} s"
    if now > 2 * usual:
        message += f", {now / usual:.1f}x the usual. Compare the phases of a step"
        return HealthFinding("warning", "speed", message, MetricName.STEP_SECONDS)
    return HealthFinding("good", "speed", message, MetricName.STEP_SECONDS)


CHECKS: tuple[Callable[[Records], HealthFinding | None], ...] = (
    _finite,
    _mismatch,
    _gradient,
    _entropy,
    _signal,
    _infrastructure,
    _endings,
    _speed,
)
"""All checks but ``_ratio``. A check returns None if the run does not record its metric."""


# -- state of a run -------------------------------------------------------------------------------

State = Literal["waiting", "running", "stalled", "stopped", "finished"]


def classify_run(
    records: Records,
    now: float,
    *,
    steps: int | None,
    is_finished: bool,
    holder_is_alive: bool | None,
) -> State:
    """Return the state of a run.

    Args:
        records: lines of metrics.jsonl.
        now: current Unix time in seconds.
        steps: planned number of steps; None if unknown.
        is_finished: whether the run has a summary.
        holder_is_alive: whether the process that holds the run's lock exists; None if it is unknown,
            for example because it is on another machine.
    """
    done = records[-1]["step"] if records else 0
    # A resumed run with more steps still has the summary of the shorter run.
    if is_finished and (steps is None or done >= steps):
        return "finished"
    if holder_is_alive is False:
        return "stopped"
    if not records:
        return "waiting"

    usual = statistics.median(_values(records[-100:], MetricName.STEP_SECONDS) or [60.0])
    silent = now - records[-1].get("time", now)
    # A step may be much longer than usual, such as one with an evaluation.
    patience = max(600.0, 10 * usual)
    if silent < patience:
        return "running"
    # Without a known process, silence is the only sign that the run has ended.
    return "stalled" if holder_is_alive else "stopped"
