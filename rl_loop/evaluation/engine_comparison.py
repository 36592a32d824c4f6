"""What ``gptoss doctor --engine`` prints: how an engine is set up, and how far its log-probs of
held-out episodes are from the trainer's: with experts chosen freely and, if the algorithm replays
routes, as the engine chose them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.chat.codec import ChatCodec
from rl_loop.data.samples import to_samples
from rl_loop.rollout.collector import held_out_requests
from rl_loop.rollout.pool import RolloutPool
from rl_loop.tasks.source import TaskSource
from rl_loop.trainer.group import TrainerGroup
from rl_loop.weight_sync.canary import CanaryTolerance, check_canary

POSITIONS = (0, 128, 512, 2048, 8192)
"""Where ranges of positions begin: GPT-OSS's window, then four times as far each."""

SETTINGS = (
    "version",
    "attention_backend",
    "moe_runner_backend",
    "enable_deterministic_inference",
    "dtype",
    "tp_size",
)
"""What an engine is asked about itself."""

QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class TokenGap:
    """How far engine and trainer are apart on one sampled token."""

    position: int
    """In its episode."""
    token_class: str
    """What kind of text it is."""
    gap: float
    """|log-prob of the trainer - log-prob of the engine|, in nats."""


def engine_report(
    trainer: TrainerGroup,
    rollouts: RolloutPool,
    tasks: TaskSource,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    canary_tolerance: CanaryTolerance,
) -> str:
    """Compare a trainer and an engine that are ready, on held-out tasks. Raises CanaryError if
    they hold two models."""
    rollouts.sync_weights(trainer, 0)
    lines = [f"{name}: {value}" for name, value in rollouts.engine_settings(SETTINGS).items()]
    canary = check_canary(trainer, rollouts, tasks.canary(), tolerance=canary_tolerance, version=0)
    lines.append(f"canary: {canary:.2e} nats per token")

    groups = rollouts.run(held_out_requests(tasks, temperature, with_routes=True))
    samples = to_samples(groups, algorithm, version=0)
    # First with the experts that the trainer chooses: what a run without replay would see.
    table = gap_table(samples, trainer.score(samples.without_routes()), tasks.codec)
    lines += ["", "|d log p|, the trainer routes freely", *table]
    if samples.routed_experts is not None:
        table = gap_table(samples, trainer.score(samples), tasks.codec)
        lines += ["", "|d log p|, the trainer takes the engine's routes", *table]

    if algorithm.routing_replay == "R3":
        counts = trainer.route_agreement()
        compared = counts["routes_compared"]
        share = counts["routes_agreeing"] / compared
        lines.append(
            f"the trainer would have chosen the same experts for {share:.2%} of {compared:.0f} routes"
        )
    return "\n".join(lines)


def gap_table(samples: TrainingSamples, scores: np.ndarray, codec: ChatCodec) -> list[str]:
    """Format the distribution of |trainer's - engine's log-prob|, in nats, by position and class
    of token. ``scores``: the trainer's, [tokens]."""
    tokens = _token_gaps(samples, scores, codec)
    if not tokens:
        return ["no token was sampled"]

    lines = [f"{'':26}{'tokens':>8}{'mean':>11}{'p50':>11}{'p95':>11}{'p99':>11}{'max':>11}"]
    lines += _row("all", tokens)
    for start, end in zip(POSITIONS, (*POSITIONS[1:], float("inf")), strict=True):
        lines += _row(
            f"position {start} and on",
            [token for token in tokens if start <= token.position < end],
        )
    for name in sorted({token.token_class for token in tokens}):
        lines += _row(name, [token for token in tokens if token.token_class == name])
    return lines


def _token_gaps(samples: TrainingSamples, scores: np.ndarray, codec: ChatCodec) -> list[TokenGap]:
    """Compare engine and trainer on every sampled token."""
    assert samples.rollout_log_probs is not None
    positions = np.arange(samples.tokens) - np.repeat(samples.offsets[:-1], samples.lengths)
    gaps = np.abs(scores - samples.rollout_log_probs)

    tokens = []
    for i in np.flatnonzero(samples.loss_mask):
        text = codec.decode_token(int(samples.token_ids[i]))
        tokens.append(TokenGap(int(positions[i]), _class_of(text), float(gaps[i])))
    return tokens


def _row(name: str, tokens: Sequence[TokenGap]) -> list[str]:
    """Format one line of the table; none for no tokens."""
    if not tokens:
        return []
    gaps = np.array([token.gap for token in tokens])
    figures = (gaps.mean(), *np.quantile(gaps, QUANTILES), gaps.max())
    return [f"{name:26}{len(gaps):>8}" + "".join(f"{figure:>11.2e}" for figure in figures)]


def _class_of(text: str) -> str:
    """Name the kind of text that a token is."""
    if text.startswith("<|") and text.endswith("|>"):
        return "special tokens"
    stripped = text.strip()
    if not stripped:
        return "white space"
    if stripped.isdigit():
        return "digits"
    if stripped.isalpha():
        return "words"
    return "punctuation and mixed"
