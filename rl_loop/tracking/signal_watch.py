"""Detects that a run has no learning signal, and derives the reason from its metrics."""

from collections.abc import Mapping, Sequence

from rl_loop.tracking.metrics import MetricName

PATIENCE = 5
"""Number of consecutive steps without a signal before the warning. Shorter runs warn at their end.

One or two such steps are normal chance in a longer run.
"""


class SignalWatch:
    """Checks the metrics of every step.

    It warns once, because the reason does not change without learning.
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self._patience = patience
        self._steps = 0
        self._warned = False

    def observe(self, values: dict[str, float], gradients: Sequence[float]) -> str | None:
        """Check one more step of the policy. Do not pass steps in which only the critic learns.

        A step has no signal if no group has one, if its gradients are exactly 0, or if all tokens
        are masked and there is no update.

        Args:
            values: metrics of the step.
            gradients: gradient norms of its optimizer steps.

        Returns:
            A warning when it is due, else None.
        """
        # The share is a quotient of counts, so it is exactly 1 if no group has a signal.
        has_signal = values.get(MetricName.ZERO_ADVANTAGE_FRACTION) != 1
        if has_signal and any(gradient != 0 for gradient in gradients):
            self._steps = 0
            return None

        self._steps += 1
        if self._steps < self._patience or self._warned:
            return None
        self._warned = True
        return f"warning: nothing to learn from in the last {self._steps} steps: {_reason(values, gradients)}"


def _reason(values: dict[str, float], gradients: Sequence[float]) -> str:
    # A list without norms means that no optimizer step was taken.
    if not gradients:
        return (
            "no token is in the loss, so the policy is not updated. rollout.truncated_episodes=mask "
            f"leaves out episodes that reach a limit ({_most_frequent_end(values)}). Increase the limits, or set "
            "it to penalize"
        )
    if values.get(MetricName.ZERO_ADVANTAGE_FRACTION) != 1:
        return (
            "the gradient is exactly 0, although rewards differ within some tasks. The metrics "
            "correction/dropped_fraction/* and clip_fraction show which tokens are left out. Also check ablation.freeze"
        )

    return explain_no_signal(values)


def explain_no_signal(values: Mapping[str, float]) -> str:
    """Return why no group has a signal, and a remedy, from the metrics of a step."""
    reward = values.get(MetricName.REWARD, 0.0)
    finding = (
        "all episodes of each task have the same reward, so every advantage is 0 "
        f"(mean reward {reward:.3f}, {_most_frequent_end(values)})"
    )
    if values.get(MetricName.ACCURACY, 0.0) >= 1:
        return f"{finding}. The policy solves all tasks. Use harder tasks, or stop the run"
    return (
        f"{finding}. A policy that never succeeds cannot learn from rewards. Fine-tune it on "
        "demonstrations first (gptoss sft), use easier tasks, or increase rollout.samples_per_task. "
        "`gptoss report` shows whole episodes"
    )


def _most_frequent_end(values: Mapping[str, float]) -> str:
    """Return the most frequent end of episodes, such as "100% end as format_error"."""
    endings = {name: share for name, share in values.items() if name.startswith("finish/")}
    if not endings:
        return "no episodes"
    name = max(endings, key=lambda ending: endings[ending])
    return f"{endings[name]:.0%} of the episodes end as {name.removeprefix('finish/')}"
