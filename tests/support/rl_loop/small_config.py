"""Configuration of small runs with a randomly initialized model."""

from __future__ import annotations

from pathlib import Path

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.head_size=16",
    "initial_weights=null",
    "rollout.workers=1",
    "rollout.tasks_per_step=2",
    "rollout.samples_per_task=4",
    # An untrained policy samples a stop token about every 300 tokens. Some episodes end with a
    # format error, some at the limit. Their rewards differ, so updates have a gradient.
    "rollout.max_sampled_tokens_per_turn=64",
    "rollout.routed_experts=true",
    "reward.format_error=-2",
    "tasks.held_out_tasks=1",
    "evaluate_every=100",
    "training.checkpoint_every=100",
]


def config(directory: Path, *overrides: str) -> RlConfig:
    return load_config(
        CONFIGS / "rl/tiny_retool.yaml", RlConfig, [*SMALL, f"output_dir={directory}", *overrides]
    )


NOTHING_ENDS = [
    "rollout.max_sampled_tokens_per_turn=1",
    "training.steps=2",
    "training.checkpoint_every=1",
    "seed=1",
]
"""With this seed, no episode reaches a stop token."""
