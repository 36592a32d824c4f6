"""Overrides for tiny runs, and curves of their metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_loop.tracking.run_directory import (
    is_training_step,
    read_json_lines,
)

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.head_size=16",
]
RL = [
    *SMALL,
    "initial_weights=null",
    "rollout.workers=1",
    "rollout.tasks_per_step=2",
    # An untrained policy samples a stop token about every 300 tokens. Some episodes end with a
    # format error, some at the limit. Their rewards differ, so updates have a gradient. Decoding
    # takes as long for 16 sequences as for 8, so there are many short ones.
    "rollout.samples_per_task=8",
    "rollout.max_sampled_tokens_per_turn=70",
    "reward.format_error=-2",
    "tasks.held_out_tasks=4",
    "evaluate_every=100",
]


class Quiet:
    """A progress display that shows nothing.

    Args:
        on_step: called after every training step with the number of completed steps.
    """

    def __init__(self, on_step: object = None) -> None:
        self.on_step, self.notes = on_step, []

    @contextmanager
    def __call__(self, title: str, total: int, first: int) -> Iterator[Quiet]:
        yield self

    def phase(self, name: str) -> None: ...

    def episodes(self, ended: int, wanted: int) -> None: ...

    def note(self, message: str) -> None:
        self.notes.append(message)

    def step(self, step: int, values: dict[str, float]) -> None:
        if self.on_step is not None and is_training_step(values):
            self.on_step(step)


def curve(path: Path) -> list[float]:
    """Return reward, loss and gradient norm of every step, in sequence."""
    steps = [record for record in read_json_lines(path / "metrics.jsonl") if "reward" in record]
    assert all(step["grad_norm"] > 0 for step in steps), "no step had anything to learn from"
    return [step[name] for step in steps for name in ("reward", "loss", "grad_norm")]
