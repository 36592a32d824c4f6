"""Train from Python instead of YAML: fine-tune a tiny model, then improve it by RL.

    python examples/train.py [DIRECTORY] [STEPS]

runs on 2 CPU cores. A configuration is a pydantic model (docs/reference/configuration.md). Build it
from Python values, or load a file and override keys. Errors name the wrong key.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.run import run_rl, run_sft
from rl_loop.tracking.progress import Progress, SilentProgress
from rl_loop.tracking.run_directory import metric_curve, read_json, read_json_lines

MODEL = {
    "num_layers": 4,
    "num_experts": 4,
    "experts_per_token": 2,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_size": 32,
    "vocab_size": 576,
    "sliding_window": 16,
    "max_length": 1024,
    "yarn_original_length": 128,
    "yarn_factor": 8.0,
    "initializer_std": 0.08,
}
PROMPT = {
    "model_identity": None,
    "knowledge_cutoff": None,
    "reasoning_effort": None,
    "channels": False,
    "describe_builtin_tools": False,
}


def fine_tuning(directory: Path, steps: int) -> SftConfig:
    """Return a configuration built from Python values."""
    return SftConfig.model_validate(
        {
            "name": "python_sft",
            "output_dir": directory,
            "model": MODEL,
            "dtype": "fp32",
            "vocabulary": "tiny",
            "prompt": PROMPT,
            "tasks": {
                "sources": {"retool": {"environment": "retool", "options": {"instructions": None}}}
            },
            "optimizer": {"lr": 1e-3, "warmup_steps": 5},
            "sequences_per_step": 16,
            "training": {"steps": steps, "max_tokens_per_micro_batch": 4096},
            "rollout": {"max_sampled_tokens_per_turn": 48, "max_episode_tokens": 384},
        }
    )


def reinforcement(directory: Path, steps: int, start: Path) -> RlConfig:
    """Load a shipped configuration and override keys, like the command line of ``gptoss rl``."""
    overrides = [
        "name=python_rl",
        f"output_dir={directory}",
        f"initial_weights={start}",
        f"training.steps={steps}",
        "rollout.tasks_per_step=4",
        "rollout.workers=1",
        "tasks.held_out_tasks=8",
    ]
    return load_config(Path("tiny_retool"), RlConfig, overrides)


class PrintedSteps(SilentProgress):
    """Display that prints a line per step. Without a display, a run is silent."""

    def __init__(self, title: str) -> None:
        self.title = title

    def step(self, step: int, values: dict[str, float]) -> None:
        # Evaluations arrive as values of a step, too, but with other names.
        for name in ("reward", "loss"):
            if name in values:
                print(f"{self.title} step {step}: {name} {values[name]:.3f}", flush=True)
                break


@contextmanager
def show(title: str, total: int, first: int) -> Iterator[Progress]:
    """Show a run of ``total`` steps that starts at step ``first``."""
    yield PrintedSteps(title)


def main(directory: Path, steps: int) -> None:
    """Train both stages and read their results from the run directories."""
    start = run_sft(fine_tuning(directory, steps), show, overwrite=True)
    run = run_rl(reinforcement(directory, steps, start), show, overwrite=True)

    _, rewards = metric_curve(read_json_lines(run / "metrics.jsonl"), "reward")
    print(f"rewards: {rewards}")
    summary = read_json(run / "summary.json")
    before, after = summary["held_out_accuracy_sft"], summary["held_out_accuracy_rl"]
    print(f"held-out accuracy: {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    main(
        Path(sys.argv[1] if len(sys.argv) > 1 else "runs"),
        int(sys.argv[2]) if len(sys.argv) > 2 else 20,
    )
