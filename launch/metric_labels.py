"""Labels of metrics, for the terminal and the viewer."""

from rl_loop.tracking.metrics import MetricName

LABELS: dict[str, str] = {
    MetricName.REWARD: "reward",
    MetricName.LOSS: "loss",
    MetricName.VALIDATION_LOSS: "validation loss",
    MetricName.TOOL_CALL_ACCURACY: "right tool calls",
    MetricName.ANSWER_ACCURACY: "right answers",
    MetricName.ACCURACY: "accuracy",
    MetricName.HELD_OUT_ACCURACY: "held-out accuracy",
    MetricName.HELD_OUT_REWARD: "held-out reward",
    MetricName.TOOL_CALL_RATE: "tool calls",
    MetricName.HELD_OUT_TOOL_CALL_RATE: "held-out tool calls",
    MetricName.TURNS: "turns",
    MetricName.HELD_OUT_TURNS: "held-out turns",
    MetricName.TOKENS_PER_SECOND: "tokens/s",
    MetricName.LOG_PROB_GAP: "|Δlogp|",
    MetricName.CLIP_FRACTION: "clipped",
    MetricName.GRAD_NORM: "grad norm",
    MetricName.ENTROPY: "entropy",
}
"""Short labels by name of the metric. Other metrics are shown with their names."""
