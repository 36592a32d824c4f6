"""The canary: a check that engines and trainer give a known text equal log-probs after a sync.

Checks of names and shapes do not detect a transposed square weight, a missing bias, a sink that did
not arrive, or a tensor of the previous version. The canary does.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from converters.mxfp4_tensors import Digests, first_difference
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.user_error import UserError

TOLERANCES = {"fp32": 1e-3, "bf16": 2e-2}
"""Default tolerances by precision: mean |log-prob difference| in nats per token.

Used unless the configuration has a tolerance. The measured rounding of an engine may raise it.
"""

SAME_WEIGHTS = 0.02
"""Largest mean |log-prob difference| of two engines of one kind with equal weights, in nats."""

ROUNDING_ERRORS = 3
"""Tolerance in units of the engine's measured rounding error.

One unit is for the engine, and up to two are for the trainer, which rounds to the same dtype at
other points. Both keep logits in fp32. A trained tiny GPT-OSS in bf16 differs by 2.0 units, a dense
model by 1.3, and random weights by 1.0 to 1.3.
"""

TEMPERATURE = 1.0
"""Temperature of the compared scores. SGLang servers support no other one."""


class CanaryError(UserError, RuntimeError):
    """Engine and trainer disagree after a weight sync."""


class CheckedTrainer(Protocol):
    """Trainer whose scores and quantized experts are the reference, such as a TrainerGroup."""

    def score(self, samples: TrainingSamples, temperature: float | None = None) -> np.ndarray:
        """Return log-probs in nats: float32 [tokens], 0 for the first token of a sequence."""
        ...

    def mxfp4_digests(self) -> Digests: ...


class CheckedEngines(Protocol):
    """Engines of a run, such as a RolloutPool. Unsupported measurements are left out."""

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]: ...

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]: ...

    def mxfp4_digests(self) -> list[Digests]: ...

    def compare_weights(self) -> None: ...


@dataclass(frozen=True)
class Canary:
    """A text and its log-probs from an engine with correct weights."""

    token_ids: list[int]
    """Token ids of the text."""
    log_probs: list[float]
    """Log-probs of ``token_ids[1:]``, in nats."""

    def gap(self, log_probs: Sequence[float]) -> float:
        """Return the mean |log-prob difference| to other log-probs of the text, in nats."""
        differences = [abs(a - b) for a, b in zip(log_probs, self.log_probs, strict=True)]
        return sum(differences) / len(differences)


def exceeds(gap: float, nats: float) -> bool:
    """Return True if a gap is above a tolerance, or NaN."""
    # Not ``gap > nats``, which is False for NaN.
    return not gap <= nats


@dataclass(frozen=True)
class SyncCheck:
    """Result of the check after a weight sync."""

    canary_gap: float
    """Largest mean |log-prob difference| over the engines, in nats per token."""
    mxfp4_digests: Digests = field(default_factory=dict)
    """Digests of the experts that were compared bit by bit."""


@dataclass(frozen=True)
class CanaryTolerance:
    """Largest allowed difference between engine and trainer on the canary."""

    nats: float
    """Mean |log-prob difference| in nats per token."""
    is_default: bool
    """True if ``nats`` is from TOLERANCES. The measured rounding of an engine may then raise it."""
    dtype: str
    """Precision of both sides."""

    @classmethod
    def of(cls, configured: float | None, dtype: str) -> "CanaryTolerance":
        """Return the configured tolerance, or the default for ``dtype`` if it is None."""
        return cls(configured or TOLERANCES[dtype], configured is None, dtype)

    def with_rounding(self, rounding: float | None) -> float:
        """Return the tolerance in nats for an engine with this rounding error. None: unknown."""
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
    """Compare every engine with the trainer: bits of quantized experts, then the canary.

    Args:
        trainer: reference.
        engines: engines to check.
        token_ids: canary text.
        tolerance: largest allowed difference.
        version: version of the weights, for messages.
        is_quantized: whether the run has quantized experts to compare.

    Raises:
        CanaryError: if bits or log-probs differ.
        WeightMismatchError: if log-probs differ, and a server holds another tensor than was sent.
    """
    # Bits first, because a difference names its matrix. The canary covers all weights, but shows
    # only that something differs.
    mxfp4_digests: Digests = {}
    if is_quantized:
        mxfp4_digests = check_mxfp4_experts(trainer, engines, version)
    gap = check_canary(trainer, engines, token_ids, tolerance=tolerance, version=version)
    return SyncCheck(gap, mxfp4_digests)


def check_canary(
    trainer: CheckedTrainer,
    engines: CheckedEngines,
    token_ids: list[int],
    *,
    tolerance: CanaryTolerance,
    version: int,
) -> float:
    """Compare log-probs of the canary after a weight sync.

    Args:
        trainer: reference.
        engines: engines to check.
        token_ids: canary text.
        tolerance: largest allowed difference.
        version: version of the weights, for messages.

    Returns:
        The largest mean |log-prob difference| over the engines, in nats per token.

    Raises:
        WeightMismatchError: if the difference is too large, and a server holds another tensor than was
            sent.
        CanaryError: if the difference is too large.
    """
    # The first token has no log-prob, because no token precedes it.
    columns = {"token_ids": token_ids, "loss_mask": [0] + [1] * (len(token_ids) - 1)}
    text = TrainingSamples.join([columns], names=["the canary"])

    # Both score in parallel. No update begins until both have returned.
    with ThreadPoolExecutor(1, "canary") as thread:
        scoring = thread.submit(engines.score, token_ids, TEMPERATURE)
        canary = Canary(token_ids, trainer.score(text, TEMPERATURE)[1:].tolist())
        answers = scoring.result()

    # Compare each engine separately, because one of several servers may have missed a tensor.
    gaps = [canary.gap(log_probs) for log_probs in answers]
    if not any(exceeds(gap, tolerance.nats) for gap in gaps):
        return max(gaps, default=0.0)

    # Rounding can only raise a default tolerance. It is measured only if a gap exceeds the default.
    measured: list[float | None] = []
    if tolerance.is_default:
        measured = engines.rounding_errors(token_ids)
    # No measurement means that no engine can measure it.
    roundings = measured or [None] * len(gaps)
    for worker, (gap, rounding) in enumerate(zip(gaps, roundings, strict=True)):
        if exceeds(gap, tolerance.with_rounding(rounding)):
            # Raises an error that names the tensor, if the engines support it.
            engines.compare_weights()
            raise CanaryError(_describe_gap(gap, rounding, worker, tolerance, version))
    return max(gaps)


def _describe_gap(
    gap: float, rounding: float | None, worker: int, tolerance: CanaryTolerance, version: int
) -> str:
    """Return a message about a difference that is too large, with its possible causes."""
    nats = tolerance.with_rounding(rounding)
    differ = (
        f"canary_tolerance: after syncing weights {version}, rollout worker {worker} and the trainer "
        f"differ by {gap:.2e} nats per token on the canary prompt (tolerance {nats:.2e})."
    )
    cause = _possible_cause(rounding, tolerance.dtype)
    return (
        f"{differ} {cause} The run has not trained on this version. Correct the cause, then continue "
        "from the last checkpoint with --resume."
    )


def _possible_cause(rounding: float | None, dtype: str) -> str:
    """Return the possible causes of a difference. ``rounding`` is None if it was not measured."""
    different = "They do not compute the same model"
    if rounding is not None:
        return (
            f"Rounding to {dtype} changes the engine's log-probs by only {rounding:.2e}, so "
            "they do not compute the same model."
        )
    if dtype == "fp32":
        return f"{different}."
    return (
        f"{different}, or the cause is rounding to {dtype}. Run `gptoss doctor --engine` with "
        "dtype=fp32. If its canary is below 1e-3, the cause is rounding. Increase canary_tolerance then."
    )


def check_mxfp4_experts(trainer: CheckedTrainer, engines: CheckedEngines, version: int) -> Digests:
    """Check that every engine holds the bits of the trainer's quantized experts.

    Returns:
        Digests of the experts. Empty if the engines hold the experts in another format. Only values
        are compared then.

    Raises:
        CanaryError: if a matrix differs. The message names the first one.
    """
    # The engines come first: if they have no digests, the trainer need not compute its own.
    engine_digests = engines.mxfp4_digests()
    if not engine_digests:
        return {}

    expected = trainer.mxfp4_digests()
    for worker, digests in enumerate(engine_digests):
        name = first_difference(expected, digests)
        if name is not None:
            raise CanaryError(
                f"tensor {name}: its MXFP4 values on rollout worker {worker} differ from those of the "
                f"trainer after the sync of weights {version} (digest {digests.get(name, 'none')}, "
                f"expected {expected.get(name, 'none')}). The run has not trained on this version. "
                "Continue from the last checkpoint with --resume"
            )
    return expected
