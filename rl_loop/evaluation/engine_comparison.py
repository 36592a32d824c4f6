"""Report of ``gptoss doctor --engine``: settings of an engine, and its log-prob gap to the trainer.

The gap is measured on held-out episodes, with freely chosen experts. If the algorithm replays
routes, it is also measured with the engine's experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.chat.codec import ChatCodec
from rl_loop.data.samples import to_samples
from rl_loop.rollout.collector import held_out_requests
from rl_loop.rollout.pool import RolloutPool
from rl_loop.tasks.source import TaskMixture
from rl_loop.trainer.group import TrainerGroup
from rl_loop.weight_sync.canary import CanaryTolerance, check_canary

POSITIONS = (0, 128, 512, 2048, 8192)
"""Starts of the ranges of positions: GPT-OSS's window, then factors of four."""

SETTINGS = (
    "version",
    "attention_backend",
    "moe_runner_backend",
    "enable_deterministic_inference",
    "dtype",
    "tp_size",
)
"""Settings of the engine in the report."""

QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class TokenGap:
    """Log-prob gap between engine and trainer on one sampled token."""

    position: int
    """Position in its episode."""
    token_class: str
    """Class of its text."""
    gap: float
    """|log-prob of the trainer - log-prob of the engine|, in nats."""


def engine_report(
    trainer: TrainerGroup,
    rollouts: RolloutPool,
    tasks: TaskMixture,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    canary_tolerance: CanaryTolerance,
) -> str:
    """Compare a trainer and an engine, which must be ready, on held-out tasks.

    Returns:
        The report.

    Raises:
        CanaryError: if they have different models.
    """
    # Both get the same weights, so that only their computation can differ.
    rollouts.sync_weights(trainer, 0)
    lines = [f"{name}: {value}" for name, value in rollouts.engine_settings(SETTINGS).items()]
    # With different models, the tables below would mean nothing.
    canary = check_canary(trainer, rollouts, tasks.canary(), tolerance=canary_tolerance, version=0)
    lines.append(f"canary: {canary:.2e} nats per token")

    groups = rollouts.run(held_out_requests(tasks, temperature, with_routes=True))
    # Version 0 is the one that was synced above.
    samples = to_samples(groups, algorithm, version=0)
    # First with the trainer's own experts, as in a run without replay.
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
    """Return a table of |trainer's - engine's log-prob| in nats, by position and class of token.

    Args:
        samples: samples with the engine's log-probs.
        scores: the trainer's log-probs, [tokens].
        codec: codec that decodes tokens.
    """
    tokens = _token_gaps(samples, scores, codec)
    if not tokens:
        return ["no token was sampled"]

    lines = [f"{'':26}{'tokens':>8}{'mean':>11}{'p50':>11}{'p95':>11}{'p99':>11}{'max':>11}"]
    lines += _row("all", tokens)
    # The last range has no end.
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
    # Samples are concatenated, so subtract the start of each one.
    positions = np.arange(samples.tokens) - np.repeat(samples.offsets[:-1], samples.lengths)
    gaps = np.abs(scores - samples.rollout_log_probs)

    tokens = []
    for i in np.flatnonzero(samples.loss_mask):
        text = codec.decode_token(int(samples.token_ids[i]))
        tokens.append(TokenGap(int(positions[i]), _classify_token(text), float(gaps[i])))
    return tokens


def _row(name: str, tokens: Sequence[TokenGap]) -> list[str]:
    """Return one line of the table. Returns none without tokens."""
    if not tokens:
        return []
    # Means hide rare large gaps, so show quantiles and the maximum, too.
    gaps = np.array([token.gap for token in tokens])
    statistics = (gaps.mean(), *np.quantile(gaps, QUANTILES), gaps.max())
    return [f"{name:26}{len(gaps):>8}" + "".join(f"{number:>11.2e}" for number in statistics)]


def _classify_token(text: str) -> str:
    """Return the class of a token's text."""
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
