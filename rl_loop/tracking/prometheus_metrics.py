"""Exports a run's metrics to Prometheus, together with Ray's metrics on every node.

Ray puts ``ray_`` in front of all names, and adds ``_total`` to names of counters.
"""

import re

from ray.util.metrics import Counter, Gauge

from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.tracking.metrics import Listener

COUNTERS = {
    "sampled_tokens": "tokens that the engine sampled",
    "episodes": "finished episodes",
    "tool_calls": "calls of tools",
    "tool_errors": "calls of tools that failed",
}
"""{name of a total: description}."""


class RolloutCounters:
    """Totals per rollout worker, exported as ``ray_gptoss_rollout_NAME_total``."""

    def __init__(self) -> None:
        self._counters = {
            name: Counter(f"gptoss_rollout_{name}", description=text, tag_keys=("worker",))
            for name, text in COUNTERS.items()
        }

    def count(self, worker: int, group: TrajectoryGroup) -> None:
        """Add the finished episodes of a group to the totals of a rollout worker."""
        totals = {
            "episodes": len(group.trajectories),
            "sampled_tokens": sum(sequence.sampled_tokens for sequence in group.sequences),
            "tool_calls": sum(sequence.tool_calls for sequence in group.sequences),
            "tool_errors": sum(sequence.tool_errors for sequence in group.sequences),
        }
        for name, total in totals.items():
            # Ray's counters reject an increment of 0.
            if total > 0:
                self._counters[name].inc(total, tags={"worker": str(worker)})


def prometheus_listener(run_name: str) -> Listener:
    """Return a listener that exports each metric of a step as a gauge ``ray_gptoss_NAME``."""
    gauges: dict[str, Gauge] = {}

    def listen(step: int, values: dict[str, float]) -> None:
        for name, value in {"step": float(step), **values}.items():
            if name not in gauges:
                # Ray raises an error for other characters in a description.
                shown = name.encode("ascii", errors="replace").decode()
                gauges[name] = Gauge(
                    gauge_name(name), description=f"{shown} of the newest step", tag_keys=("run",)
                )
            gauges[name].set(value, tags={"run": run_name})

    return listen


def gauge_name(metric: str) -> str:
    """Return the name of a metric's gauge, without the ``ray_`` that Ray adds.

    Ray discards a name with other characters than ASCII letters, digits and underscores, and
    exports repeated underscores as one.
    """
    return "gptoss_" + re.sub(r"[^A-Za-z0-9]+", "_", metric)
