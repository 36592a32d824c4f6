"""The canary: after every weight sync, engine and trainer must give one known text the same
log-probs.

A transposed square weight, a missing bias, a sink that did not arrive or a tensor of the previous
version passes every check of names and shapes and shows up here at once."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from converters.mxfp4_tensors import Digests, first_difference
from megatron_gptoss.samples import Sample, TrainingSamples
from megatron_gptoss.user_error import UserError

TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2}
"""Largest mean |log-prob difference| by precision, in nats per token, where the
configuration does not say."""

TEMPERATURE = 1.0
"""Of the scores that are compared; SGLang's servers know no other."""


class CanaryError(UserError, RuntimeError):
    """Engine and trainer disagree right after a weight sync."""


class PackedTrainer(Protocol):
    """Knows the bits of its quantized experts: a TrainerGroup."""

    def packed_digests(self) -> Digests: ...


class PackedEngines(Protocol):
    """Know those that they hold: a RolloutPool."""

    def packed_digests(self) -> list[Digests]: ...


class ScoringTrainer(Protocol):
    """Scores texts with the policy: a TrainerGroup."""

    def score(self, samples: TrainingSamples, temperature: float | None = None) -> np.ndarray: ...


class ScoringEngines(Protocol):
    """Score a text with every engine: a RolloutPool."""

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]: ...

    def compare_weights(self) -> None: ...


class CheckedTrainer(PackedTrainer, ScoringTrainer, Protocol):
    """Both: a TrainerGroup."""


class CheckedEngines(PackedEngines, ScoringEngines, Protocol):
    """Both: a RolloutPool."""


@dataclass(frozen=True)
class SyncCheck:
    """What was found when all engines were compared with the trainer after a weight sync."""

    canary_gap: float
    """See ``check_canary``."""
    packed_experts: Digests = field(default_factory=dict)
    """See ``check_packed_experts``."""


def check_sync(
    trainer: CheckedTrainer,
    engines: CheckedEngines,
    token_ids: list[int],
    *,
    tolerance: float,
    version: int,
    is_quantized: bool,
) -> SyncCheck:
    """Compare every engine with the trainer: bits of quantized experts, if there are any, then the
    canary. Raises what these raise."""
    packed_experts: Digests = {}
    if is_quantized:
        packed_experts = check_packed_experts(trainer, engines, version)
    gap = check_canary(trainer, engines, token_ids, tolerance=tolerance, version=version)
    return SyncCheck(gap, packed_experts)


def check_canary(
    trainer: ScoringTrainer,
    engines: ScoringEngines,
    token_ids: list[int],
    *,
    tolerance: float,
    version: int,
) -> float:
    """Return the largest mean |log-prob difference| over the engines, in nats per token.

    Above ``tolerance`` it raises WeightMismatch naming the first tensor that a server holds
    otherwise, or CanaryError."""
    loss_mask = [0] + [1] * (len(token_ids) - 1)
    text = TrainingSamples.join([Sample(token_ids, loss_mask, name="the canary")])

    # Both at the same time: no update begins until both have answered.
    with ThreadPoolExecutor(1, "canary") as thread:
        scoring = thread.submit(engines.score, token_ids, TEMPERATURE)
        expected = trainer.score(text, TEMPERATURE)[1:].tolist()
        answers = scoring.result()

    # Every engine by itself: one of several servers may have missed a tensor.
    worst = 0.0
    for worker, log_probs in enumerate(answers):
        differences = [abs(a - b) for a, b in zip(log_probs, expected, strict=True)]
        gap = sum(differences) / len(expected)
        worst = max(worst, gap)
        if not gap <= tolerance:  # also true for NaN
            # Names the tensor if it can; if all are equal, both compute something else with them.
            engines.compare_weights()
            raise CanaryError(
                f"after syncing weights {version}, rollout worker {worker} and the trainer differ by {gap:.2e} nats "
                f"per token on the canary prompt (canary_tolerance {tolerance:.0e}): they do not compute "
                "the same model. Nothing was trained on this version; the last checkpoint is good."
            )
    return worst


def check_packed_experts(trainer: PackedTrainer, engines: PackedEngines, version: int) -> Digests:
    """Check that every engine holds the bits of the trainer's quantized experts.

    Returns:
        Their digests; none if the engines hold another form of them, whose values alone count.

    Raises:
        CanaryError: naming the first matrix that differs.
    """
    held = engines.packed_digests()
    if not held:
        return {}

    expected = trainer.packed_digests()
    for worker, found in enumerate(held):
        name = first_difference(expected, found)
        if name is not None:
            raise CanaryError(
                f"after syncing weights {version}, rollout worker {worker} holds other bits of {name} "
                f"({found.get(name, 'none')}) than the trainer ({expected.get(name, 'none')}). Nothing was "
                "trained on this version; the last checkpoint is good."
            )
    return expected
