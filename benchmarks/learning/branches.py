"""Updates on the episodes of a branching agent: prefixes computed once, and whole sequences.

    # after the commands of configs/rl/tiny_order.yaml for SFT
    PYTHONPATH=. python -m benchmarks.learning branches runs/tiny_order_sft

Needs no GPU. ``run_order`` of examples/clerk_agent.py plays the episodes of one training step through
the gateway. One trainer then updates with them in alternating steps, with and without shared
prefixes. Its weights stay the same.

Prints JSON. The first update of each variant is not counted.

    episodes, sequences  of the training step
    tokens, computed     inputs of whole sequences, and inputs with shared prefixes
    saved                share of the tokens that is not computed
    speed_up             median time of an update with whole sequences, relative to shared prefixes
    processor_speed_up   the same for processor time, for a machine with other load
    gradient_error       largest error of a parameter's fp32 gradient with shared prefixes, relative
                         to the norm of the gradient with whole sequences
    log_prob_error       largest difference of a token's log-prob in nats
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.learning.agents import build_requests
from megatron_gptoss.samples import TrainingSamples
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.data.credit import assign_advantages
from rl_loop.data.samples import to_samples
from rl_loop.evaluation.evaluate import load_weights
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.local_rank import LocalRank
from tests.support.in_process import LocalRollouts

CONFIG = Path(__file__).parents[2] / "configs/rl/tiny_order.yaml"
VARIANTS = {"whole": "off", "shared": "all"}
"""Value of ``training.share_prefixes`` of each variant."""


@dataclass
class Updates:
    """Updates of one variant."""

    seconds: list[float] = field(default_factory=list)
    """Wall time of each."""
    processor_seconds: list[float] = field(default_factory=list)
    """Processor time of each."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """fp32 gradient by parameter."""
    log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """float32 [tokens]: log-probs in nats."""


def read_config(run: Path, variant: str, overrides: list[str]) -> RlConfig:
    """Return the configuration of a variant, with a learning rate that changes no weight."""
    return load_config(
        CONFIG,
        RlConfig,
        [
            f"initial_weights={run}",
            "optimizer.lr=1e-30",
            *overrides,
            f"training.share_prefixes={VARIANTS[variant]}",
        ],
    )


def play_step(run: Path, config: RlConfig) -> tuple[TrainingSamples, int]:
    """Play the episodes of a training step. Return its samples, and the number of episodes."""
    weights = load_weights(run / "export" if (run / "export").exists() else run, config.dtype)
    rollouts = LocalRollouts(config)
    try:
        rollouts.sync_weights(weights, 0)
        groups = rollouts.run(build_requests(config, 0, by_agent=True))
    finally:
        rollouts.close()
    samples = to_samples(groups, config.algorithm, version=0)
    samples = assign_advantages(
        samples, groups, config.algorithm, config.rollout.max_response_tokens
    )
    return samples, sum(len(group.trajectories) for group in groups)


def compare_updates(
    samples: TrainingSamples, configs: dict[str, RlConfig], steps: int
) -> dict[str, Any]:
    """Update with both variants in alternating steps.

    Args:
        samples: samples of a training step.
        configs: configuration of each variant.
        steps: updates of each variant. The first one is not counted.
    """
    rank = LocalRank(configs["whole"])
    # Only plans differ, so one rank with one model serves both variants.
    trainers = {name: TrainerGroup(config, rank) for name, config in configs.items()}
    for trainer in trainers.values():
        trainer.ready()
    measured = {name: Updates() for name in trainers}
    saved = None
    try:
        for step in range(steps):
            for name, trainer in trainers.items():
                began, processor_began = time.perf_counter(), time.process_time()
                updates = trainer.rl_step(samples, 0)
                if step > 0:
                    measured[name].seconds.append(time.perf_counter() - began)
                    measured[name].processor_seconds.append(time.process_time() - processor_began)
                saved = updates.shared_tokens or saved

        for name, trainer in trainers.items():
            trainer.rl_step(samples, 0)
            measured[name].gradients = {
                parameter: p.main_grad.clone()
                for parameter, p in rank.worker.trainer.module.named_parameters()
            }
            measured[name].log_probs = trainer.score(samples)
    finally:
        rank.close()

    assert saved is not None
    whole, shared = measured["whole"], measured["shared"]
    return {
        "sequences": len(samples),
        "tokens": saved.tokens,
        "computed": saved.computed,
        "saved": round(1 - saved.computed / saved.tokens, 3),
        "speed_up": round(median(whole.seconds) / median(shared.seconds), 2),
        "processor_speed_up": round(
            median(whole.processor_seconds) / median(shared.processor_seconds), 2
        ),
        "gradient_error": max(
            float((shared.gradients[name] - gradient).norm() / gradient.norm())
            for name, gradient in whole.gradients.items()
            if gradient.any()
        ),
        "log_prob_error": float(np.abs(shared.log_probs - whole.log_probs).max()),
    }


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run of the second command, or a checkpoint")
    parser.add_argument("--steps", type=int, default=6, help="of both; the first is not counted")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps: at least 2, because the first is not counted")

    configs = {name: read_config(options.run, name, options.overrides) for name in VARIANTS}
    samples, episodes = play_step(options.run, configs["shared"])
    print(json.dumps({"episodes": episodes, **compare_updates(samples, configs, options.steps)}))
