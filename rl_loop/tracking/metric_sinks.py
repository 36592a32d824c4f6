"""Where a run's numbers go besides its own directory: Prometheus, which finds them beside Ray's
own metrics on every node, and Weights & Biases if asked for."""

import os
import re
from typing import Any

import yaml
from ray.util.metrics import Counter, Gauge

from rl_loop.config.errors import ConfigError
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.tracking.metrics import Listener


class RolloutCounters:
    """Totals per rollout worker: its engine's sampled tokens, its episodes, and its sandbox's
    calls and failures."""

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
            if total > 0:  # Ray refuses a zero
                self._counters[name].inc(total, tags={"worker": str(worker)})


def prometheus_listener(run_name: str) -> Listener:
    """Every metric of a step as a gauge ``gptoss_NAME``."""
    gauges: dict[str, Gauge] = {}

    def listen(step: int, values: dict[str, float]) -> None:
        for name, value in {"step": float(step), **values}.items():
            if name not in gauges:
                metric = "gptoss_" + re.sub(r"\W", "_", name)
                gauges[name] = Gauge(
                    metric, description=f"{name} of the newest step", tag_keys=("run",)
                )
            gauges[name].set(value, tags={"run": run_name})

    return listen


def wandb_listener(run_name: str, config_yaml: str) -> Listener:
    """The same curves at Weights & Biases; a resumed run continues its own. The configuration goes
    there as a tree, so that runs can be filtered and grouped by its keys."""
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            "WANDB_PROJECT is set, but wandb is not installed: pip install wandb, or unset it"
        ) from None
    run: Any = wandb.init(
        name=run_name, id=run_name, resume="allow", config=yaml.safe_load(config_yaml)
    )
    return lambda step, values: run.log(values, step=step)


def step_listeners(run_name: str, config_yaml: str) -> list[Listener]:
    """Make the listeners of a run. WANDB_PROJECT, wandb's own variable, switches Weights & Biases
    on."""
    listeners = [prometheus_listener(run_name)]
    if "WANDB_PROJECT" in os.environ:
        listeners.append(wandb_listener(run_name, config_yaml))
    return listeners
