"""Exports a run's metrics to Prometheus, together with Ray's metrics on every node."""

import re

from ray.util.metrics import Counter, Gauge

from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.tracking.metrics import Listener


class RolloutCounters:
    """Totals per rollout worker: sampled tokens, episodes, and tool calls with their failures."""

    def __init__(self) -> None:
        counted = {"sampled_tokens": "tokens that the engine sampled", "episodes": "finished episodes",
                   "tool_calls": "calls of tools", "tool_errors": "calls of tools that failed"}  # fmt: skip
        self._counters = {
            name: Counter(f"gptoss_rollout_{name}", description=text, tag_keys=("worker",))
            for name, text in counted.items()
        }

    def count(self, worker: int, group: TrajectoryGroup) -> None:
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
    """Return a listener that exports each metric of a step as a gauge ``gptoss_NAME``."""
    gauges: dict[str, Gauge] = {}

    def listen(step: int, values: dict[str, float]) -> None:
        for name, value in {"step": float(step), **values}.items():
            if name not in gauges:
                # Prometheus allows letters, digits, underscores and colons in names.
                metric = "gptoss_" + re.sub(r"\W", "_", name)
                gauges[name] = Gauge(
                    metric, description=f"{name} of the newest step", tag_keys=("run",)
                )
            gauges[name].set(value, tags={"run": run_name})

    return listen
