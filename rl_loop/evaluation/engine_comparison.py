"""What ``gptoss doctor --engine`` prints: how an engine is set up, and how far its log-probs of held-out episodes are
from the trainer's: with experts chosen freely and, if the algorithm replays routes, as the engine chose them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_gptoss.packing import Sample
from rl_loop.canary import check_canary
from rl_loop.cluster.ray_session import ray_session
from rl_loop.config.run import RlConfig
from rl_loop.data.samples import to_samples
from rl_loop.evaluation.evaluate import held_out_requests
from rl_loop.harmony.codec import Harmony
from rl_loop.session import build_rollouts, build_tasks
from rl_loop.trainer.group import TrainerGroup

POSITIONS = (0, 128, 512, 2048, 8192)  # where ranges of positions begin: GPT-OSS's window, then four times as far each
SETTINGS = ("version", "attention_backend", "moe_runner_backend", "enable_deterministic_inference", "dtype", "tp_size")


def engine_report(config: RlConfig) -> str:
    """Run engine and trainer of ``config`` on its held-out tasks. Raises CanaryError if they hold two models."""
    with ray_session():
        tasks, trainer = build_tasks(config), TrainerGroup(config)
        trainer.ready()  # servers that share its GPUs take a part of what it leaves
        rollouts = build_rollouts(config)
        try:
            rollouts.ready()
            rollouts.sync_weights(trainer, 0)
            lines = [f"{name}: {value}" for name, value in rollouts.engine_settings(SETTINGS).items()]
            lines.append(f"canary: {check_canary(trainer, rollouts, tasks.canary(), config, 0):.2e} nats per token")
            groups = rollouts.run(held_out_requests(tasks, config.rollout.temperature))
            samples = to_samples(groups, config.algorithm, 0)
            variants = {"routes freely": [replace(sample, routed_experts=None) for sample in samples]}
            if samples[0].routed_experts is not None:
                variants["takes the engine's routes"] = samples
            for title, scored in variants.items():
                table = gap_table(scored, trainer.score(scored), tasks.harmony)
                lines += ["", f"|d log p|, the trainer {title}", *table]
            if config.algorithm.routing_replay == "R3":
                counts = trainer.route_agreement()
                share, routes = counts["routes_agreeing"] / counts["routes_compared"], counts["routes_compared"]
                lines.append(f"the trainer would have chosen the same experts for {share:.2%} of {routes:.0f} routes")
        finally:
            rollouts.close()
            trainer.close()
    return "\n".join(lines)


def gap_table(samples: Sequence[Sample], scores: Sequence[Sequence[float]], harmony: Harmony) -> list[str]:
    """Lines with the distribution of |trainer's - engine's log-prob|, in nats, by position and class of token."""
    rows: list[tuple[int, str, float]] = []
    for sample, values in zip(samples, scores, strict=True):
        assert sample.rollout_log_probs is not None
        for i, mask in enumerate(sample.loss_mask):
            if mask:
                text = harmony.decode_token(sample.token_ids[i])
                rows.append((i, _class_of(text), abs(values[i] - sample.rollout_log_probs[i])))
    if not rows:
        return ["no token was sampled"]
    positions, classes, gaps = (np.array(column) for column in zip(*rows, strict=True))
    groups: list[tuple[str, Any]] = [("all", np.ones(len(gaps), dtype=bool))]
    for start, end in zip(POSITIONS, (*POSITIONS[1:], np.inf), strict=True):
        groups.append((f"position {start} and on", (positions >= start) & (positions < end)))
    groups += [(name, classes == name) for name in sorted(set(classes))]
    lines = [f"{'':26}{'tokens':>8}{'mean':>11}{'p50':>11}{'p95':>11}{'p99':>11}{'max':>11}"]
    for name, chosen in groups:
        if chosen.any():
            part = gaps[chosen]
            figures = (part.mean(), *np.quantile(part, [0.5, 0.95, 0.99]), part.max())
            lines.append(f"{name:26}{len(part):>8}" + "".join(f"{figure:>11.2e}" for figure in figures))
    return lines


def _class_of(text: str) -> str:
    if text.startswith("<|") and text.endswith("|>"):
        return "special tokens"
    if not (stripped := text.strip()):
        return "white space"
    return "digits" if stripped.isdigit() else "words" if stripped.isalpha() else "punctuation and mixed"
