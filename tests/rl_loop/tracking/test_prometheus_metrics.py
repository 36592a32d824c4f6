"""Names of metrics at the Prometheus endpoint of a Ray node."""

import re
from pathlib import Path

from prometheus_client import REGISTRY
from ray._private.telemetry.open_telemetry_metric_recorder import OpenTelemetryMetricRecorder

from rl_loop.tracking.prometheus_metrics import RolloutCounters, gauge_name, prometheus_listener

LAUNCHING = Path(__file__).parents[3] / "docs/launching.md"


def test_exported_names_are_those_of_the_documentation() -> None:
    """The names pass Ray's classes, and the recorder with which a node's agent exports them."""
    prometheus_listener("run")(1, {"held_out/accuracy": 0.5, "größe:a": 1.0})
    counters = RolloutCounters()._counters
    gauges = [gauge_name(name) for name in ("held_out/accuracy", "größe:a")]
    assert gauges == ["gptoss_held_out_accuracy", "gptoss_gr_e_a"]

    recorder = OpenTelemetryMetricRecorder()
    for name in gauges:
        recorder.register_gauge_metric(name, "")
        recorder.set_metric_value(name, {}, 1.0)
    for counter in counters.values():
        name = str(counter.info["name"])
        recorder.register_counter_metric(name, "")
        recorder.set_metric_value(name, {}, 1.0)
    samples = [sample.name for metric in REGISTRY.collect() for sample in metric.samples]
    exported = {name for name in samples if "gptoss" in name}

    totals = {f"ray_gptoss_rollout_{name}_total" for name in counters}
    assert exported == {*(f"ray_{name}" for name in gauges), *totals}
    documented = set(re.findall(r"`(ray_\w+)`", LAUNCHING.read_text()))
    assert documented == {"ray_gptoss_NAME", *totals}
