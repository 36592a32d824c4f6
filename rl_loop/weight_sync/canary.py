"""The canary: after every weight sync, engine and trainer must give one known text the same
log-probs.

A transposed square weight, a missing bias, a sink that did not arrive or a tensor of the previous
version passes every check of names and shapes and shows up here at once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from converters.mxfp4_tensors import Digests, first_difference
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.user_error import UserError

TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2}
"""Largest mean |log-prob difference| by precision, in nats per token, unless the configuration has
one or an engine measures its own rounding."""

SAME_WEIGHTS = 0.02
"""Nats per token by which two engines of one kind with the same weights may differ."""

ROUNDING_ERRORS = 3
"""Rounding errors of the engine by which engine and trainer may differ: one of its own, and up to two
for the trainer, which rounds to the same dtype in other places. Both keep logits in fp32. A trained
tiny GPT-OSS in bf16 differs by 2.0 of them, a dense one by 1.3, and random weights by 1.0 to 1.3."""

TEMPERATURE = 1.0
"""Temperature of the scores that are compared, the only one of SGLang's servers."""


class CanaryError(UserError, RuntimeError):
    """Engine and trainer disagree right after a weight sync."""


class CheckedTrainer(Protocol):
    """Scores texts with the policy, and knows the bits of its quantized experts: a TrainerGroup."""

    def score(self, samples: TrainingSamples, temperature: float | None = None) -> np.ndarray: ...

    def packed_digests(self) -> Digests: ...


class CheckedEngines(Protocol):
    """The engines of a run: a RolloutPool. It leaves out measurements that its engines do not have."""

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]: ...

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]: ...

    def packed_digests(self) -> list[Digests]: ...

    def compare_weights(self) -> None: ...


@dataclass(frozen=True)
class Canary:
    """A text, and the log-probs that an engine with the right weights gives it."""

    token_ids: list[int]
    """The text."""
    log_probs: list[float]
    """Log-probs of ``token_ids[1:]``, in nats."""

    def gap(self, log_probs: Sequence[float]) -> float:
        """Return the mean |log-prob difference| to other log-probs of the text, in nats."""
        differences = [abs(a - b) for a, b in zip(log_probs, self.log_probs, strict=True)]
        return sum(differences) / len(differences)


def exceeds(gap: float, nats: float) -> bool:
    """Return True if a gap is above a tolerance, or NaN."""
    return not gap <= nats


@dataclass(frozen=True)
class SyncCheck:
    """Result of the check after a weight sync."""

    canary_gap: float
    """Largest mean |log-prob difference| over the engines, in nats per token."""
    packed_experts: Digests = field(default_factory=dict)
    """Digests of the experts that were compared bit by bit."""


@dataclass(frozen=True)
class CanaryTolerance:
    """Largest difference between engine and trainer on the canary."""

    nats: float
    """Mean |log-prob difference| per token."""
    is_default: bool
    """True if ``nats`` is of TOLERANCES. The measured rounding of an engine may raise it then."""
    dtype: str
    """Precision of both sides."""

    @classmethod
    def of(cls, configured: float | None, dtype: str) -> "CanaryTolerance":
        """Return the tolerance of a configuration."""
        return cls(configured or TOLERANCES[dtype], configured is None, dtype)

    def with_rounding(self, rounding: float | None) -> float:
        """Return the tolerance in nats for an engine with this rounding error."""
        if not self.is_default or rounding is None:
            return self.nats
        return max(self.nats, ROUNDING_ERRORS * rounding)


def check_sync(
    trainer: CheckedTrainer,
    engines: CheckedEngines,
    token_ids: list[int],
    *,
    tolerance: CanaryTolerance,
    version: int,
    is_quantized: bool,
) -> SyncCheck:
    """Compare every engine with the trainer: bits of quantized experts, if there are any, then the
    canary.

    Raises as ``check_packed_experts`` and ``check_canary`` do.
    """
    packed_experts: Digests = {}
    if is_quantized:
        packed_experts = check_packed_experts(trainer, engines, version)
    gap = check_canary(trainer, engines, token_ids, tolerance=tolerance, version=version)
    return SyncCheck(gap, packed_experts)


def check_canary(
    trainer: CheckedTrainer,
    engines: CheckedEngines,
    token_ids: list[int],
    *,
    tolerance: CanaryTolerance,
    version: int,
) -> float:
    """Compare log-probs of the canary after a weight sync.

    Returns:
        The largest mean |log-prob difference| over the engines, in nats per token.

    Raises:
        WeightMismatch: the difference is too large, and a server holds another tensor than it was
            sent.
        CanaryError: the difference is too large.
    """
    columns = {"token_ids": token_ids, "loss_mask": [0] + [1] * (len(token_ids) - 1)}
    text = TrainingSamples.join([columns], names=["the canary"])

    # Both at the same time: no update begins until both have answered.
    with ThreadPoolExecutor(1, "canary") as thread:
        scoring = thread.submit(engines.score, token_ids, TEMPERATURE)
        canary = Canary(token_ids, trainer.score(text, TEMPERATURE)[1:].tolist())
        answers = scoring.result()

    # Every engine by itself: one of several servers may have missed a tensor.
    gaps = [canary.gap(log_probs) for log_probs in answers]
    if not any(exceeds(gap, tolerance.nats) for gap in gaps):
        return max(gaps, default=0.0)

    measured: list[float | None] = []
    if tolerance.is_default:
        measured = engines.rounding_errors(token_ids)
    roundings = measured or [None] * len(gaps)
    for worker, (gap, rounding) in enumerate(zip(gaps, roundings, strict=True)):
        if exceeds(gap, tolerance.with_rounding(rounding)):
            # Names the tensor if it can.
            engines.compare_weights()
            raise CanaryError(_describe_gap(gap, rounding, worker, tolerance, version))
    return max(gaps)


def _describe_gap(
    gap: float, rounding: float | None, worker: int, tolerance: CanaryTolerance, version: int
) -> str:
    """Describe a difference that is too large, and its possible causes."""
    nats = tolerance.with_rounding(rounding)
    differ = (
        f"canary_tolerance: after syncing weights {version}, rollout worker {worker} and the trainer "
        f"differ by {gap:.2e} nats per token on the canary prompt (tolerance {nats:.2e})."
    )
    cause = _possible_cause(rounding, tolerance.dtype)
    return f"{differ} {cause} Nothing was trained on this version; the last checkpoint is good."


def _possible_cause(rounding: float | None, dtype: str) -> str:
    """Return the possible causes of a difference. ``rounding``: None if it was not measured."""
    different = "They do not compute the same model"
    if rounding is not None:
        return (
            f"Rounding to {dtype} changes the engine's log-probs by only {rounding:.2e}, so "
            "they do not compute the same model."
        )
    if dtype == "float32":
        return f"{different}."
    return (
        f"{different}, or rounding to {dtype} changes its log-probs by as much. Run `gptoss doctor "
        "--engine` with dtype=float32: if the canary is within 1e-3 there, it is rounding, and "
        "canary_tolerance has to be larger."
    )


def check_packed_experts(trainer: CheckedTrainer, engines: CheckedEngines, version: int) -> Digests:
    """Check that every engine holds the bits of the trainer's quantized experts.

    Returns:
        Their digests; none if the engines hold another form of them, of which only values are
        compared.

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
