"""Data that the checks share: results of implementation and reference, and limits.

A limit is SAFETY times the error of the reference itself when it computes in the implementation's
precision on the same tokens. A fault is searched where it is most visible: on the tokens whose
log-probs it changes most in the reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megatron_gptoss.config.precision import Precision, torch_dtype
from rl_loop.certify.faults import ModelFault
from rl_loop.certify.implementation import ModelImplementation, ScoredSequence, checked_scores
from rl_loop.certify.model import WeightSet
from rl_loop.certify.probe_sequences import ProbeSequence, ProbeSequences
from rl_loop.certify.report import FaultVisibility
from rl_loop.certify.variants import EXACT, FaultyVariant, ReferenceModel, ReferenceResult, combine
from rl_loop.harmony.vocabulary import Vocabulary

SAFETY = 3.0
"""Limit as a multiple of the reference's error in the implementation's precision."""
VISIBLE = 1.5
"""Minimum effect of a visible fault, as a multiple of the limit."""
FLOORS: dict[Precision, float] = {"fp32": 1e-5, "bf16": 1e-2}
"""Minimum of all limits in nats: a few errors of an fp32 log-softmax, or of a bf16 logit."""
TOP = 16
"""Number of tokens to inspect for a fault."""
MAX_GAP = 1.0
"""Maximum gap per token, in nats, when explanations are compared."""


ReferenceName = Literal["exact", "rounded", "updated", "updated_rounded"]
"""Name of a reference of a check run."""


@dataclass
class ResultCache:
    """Cached results of the references."""

    # Checks share sequences and faults, and each evaluation is a whole forward pass. Keep all
    # results.
    evaluated: dict[tuple[ReferenceName, tuple[int, ...], FaultyVariant], ReferenceResult] = field(
        default_factory=dict
    )
    gradients: dict[
        tuple[ReferenceName, tuple[tuple[int, ...], ...], FaultyVariant], dict[str, Tensor]
    ] = field(default_factory=dict)


@dataclass
class CheckRun:
    """State of one check run."""

    implementation: ModelImplementation
    weights: WeightSet
    second: WeightSet | None
    precision: Precision
    sequences: ProbeSequences
    vocabulary: Vocabulary | None
    """Vocabulary of the weights. None if it is unknown."""
    explanation: FaultyVariant = EXACT
    """Faults that were found, as one variant. Later checks compare with it, so that one fault is
    not reported as another."""
    found_faults: list[ModelFault] = field(default_factory=list)
    memory: ResultCache = field(default_factory=ResultCache)
    _scored: dict[tuple[int, ...], ScoredSequence] = field(default_factory=dict)

    @cached_property
    def exact(self) -> ReferenceModel:
        """Reference in fp64."""
        return ReferenceModel(self.weights.config, self.weights.tensors)

    @cached_property
    def rounded(self) -> ReferenceModel:
        """Reference in the implementation's precision."""
        # The distance from the fp64 reference is the rounding error that a correct implementation may
        # have, too.
        dtype = torch_dtype(self.precision)
        return ReferenceModel(self.weights.config, self.weights.tensors, dtype=dtype)

    @cached_property
    def updated(self) -> ReferenceModel:
        """Reference in fp64 with the second weights. Faulty variants may use the first ones."""
        # ``check_update`` is skipped before it comes here if there are no second weights.
        assert self.second is not None
        return ReferenceModel(self.weights.config, self.second.tensors, self.weights.tensors)

    @cached_property
    def updated_rounded(self) -> ReferenceModel:
        """Reference in the implementation's precision with the second weights."""
        # Without the weights from before the update, because this reference measures only the effect of precision.
        assert self.second is not None
        dtype = torch_dtype(self.precision)
        return ReferenceModel(self.weights.config, self.second.tensors, dtype=dtype)

    @property
    def first_directory(self) -> Path:
        """Directory of the implementation's initial weights."""
        return self.weights.directory

    def scored(self, sequences: Sequence[ProbeSequence]) -> list[ScoredSequence]:
        """Return the implementation's scores of sequences. Results are cached."""
        # Pass all missing sequences in one call, so that the implementation can compute them in a
        # batch.
        missing = [sequence.ids for sequence in sequences if sequence.ids not in self._scored]
        if missing:
            scores = checked_scores(
                self.implementation, self.implementation.score(missing), missing
            )
            self._scored |= zip(missing, scores, strict=True)
        return [self._scored[sequence.ids] for sequence in sequences]

    def log_probs(self, sequences: Sequence[ProbeSequence]) -> Tensor:
        """Return the implementation's log-probs of sequences, concatenated, fp64."""
        return concatenate([scored.log_probs for scored in self.scored(sequences)])

    def evaluated(
        self,
        sequence: ProbeSequence,
        variant: FaultyVariant = EXACT,
        which: ReferenceName = "exact",
    ) -> ReferenceResult:
        """Return the result of a reference for a sequence. Results are cached."""
        key = (which, sequence.ids, variant)
        if key not in self.memory.evaluated:
            # A cached property by its name: a reference converts all weights, so create it on first
            # use.
            reference: ReferenceModel = getattr(self, which)
            self.memory.evaluated[key] = reference.evaluate(sequence.ids, variant)
        return self.memory.evaluated[key]

    def expected(
        self,
        sequences: Sequence[ProbeSequence],
        variant: FaultyVariant | None = None,
        which: ReferenceName = "exact",
    ) -> Tensor:
        """Return a reference's log-probs of sequences, concatenated.

        Args:
            sequences: sequences to evaluate.
            variant: faults of the computation. Default: ``explanation``.
            which: reference to use.
        """
        chosen = self.explanation if variant is None else variant
        return torch.cat(
            [self.evaluated(sequence, chosen, which).log_probs for sequence in sequences]
        )

    def noise(self, sequences: Sequence[ProbeSequence]) -> Tensor:
        """Return the error per token of the reference in the implementation's precision."""
        return (self.expected(sequences, EXACT, "rounded") - self.expected(sequences, EXACT)).abs()

    def gradients(
        self,
        sequences: Sequence[ProbeSequence],
        variant: FaultyVariant,
        which: ReferenceName = "exact",
    ) -> dict[str, Tensor]:
        """Return a reference's gradients. Results are cached."""
        key = (which, tuple(sequence.ids for sequence in sequences), variant)
        if key not in self.memory.gradients:
            reference: ReferenceModel = getattr(self, which)
            computed = reference.gradients([sequence.ids for sequence in sequences], variant)
            self.memory.gradients[key] = computed
        return self.memory.gradients[key]

    def limit(self, noise: Tensor, tokens: Tensor | None = None) -> float:
        """Return the limit of the median gap, over all tokens or the given ones."""
        # The median ignores the few tokens whose router chooses differently between near-tied
        # experts. In low precision their errors are large even if the implementation is correct.
        typical = noise.median()
        if tokens is not None:
            # The tokens to inspect may be more sensitive to rounding than the typical token.
            typical = torch.maximum(typical, noise[tokens].median())
        return max(SAFETY * float(typical), FLOORS[self.precision])

    def mean_limit(self, noise: Tensor) -> float:
        """Return the limit of the mean gap, with each gap clamped to MAX_GAP."""
        # Without the clamp, one token with a gap of many nats would dominate the mean.
        return max(SAFETY * float(noise.clamp(max=MAX_GAP).mean()), FLOORS[self.precision])

    def visibilities(
        self, faults: Sequence[ModelFault], sequences: Sequence[ProbeSequence], start: FaultyVariant
    ) -> tuple[FaultVisibility, ...]:
        """Search the implementation's scores for faults in addition to those of ``start``."""

        def with_fault(fault: ModelFault) -> Tensor:
            return self.expected(sequences, combine(start, fault.variant))

        return self.measure_visibility(
            faults,
            with_fault,
            self.log_probs(sequences),
            self.expected(sequences, start),
            self.noise(sequences),
        )

    def measure_visibility(
        self,
        faults: Sequence[ModelFault],
        with_fault: Callable[[ModelFault], Tensor],
        actual: Tensor,
        expected: Tensor,
        noise: Tensor,
        top: int = TOP,
    ) -> tuple[FaultVisibility, ...]:
        """Search log-probs [tokens] for faults.

        Args:
            faults: faults to search for.
            with_fault: function that returns the log-probs with a fault.
            actual: log-probs of the implementation.
            expected: log-probs of the reference.
            noise: error per token of the implementation's precision.
            top: number of tokens to inspect per fault.

        Returns:
            The visibility of each fault, and the implementation's deviation there.
        """
        gaps = (actual - expected).abs()
        visibilities = []

        for fault in faults:
            # Inspect the tokens that the fault moves most. In a mean over all tokens it would
            # vanish.
            moved = (with_fault(fault) - expected).abs()
            tokens = moved.topk(min(top, len(moved))).indices
            visible = float(moved[tokens].median())
            limit = self.limit(noise, tokens)
            visibilities.append(
                FaultVisibility(
                    fault=fault.name,
                    source=fault.source,
                    visible=visible,
                    deviation=float(gaps[tokens].median()),
                    limit=limit,
                    # A small deviation excludes a fault only if the fault would clearly exceed the
                    # limit.
                    is_visible=visible >= VISIBLE * limit,
                )
            )
        return tuple(visibilities)


def concatenate(values: Sequence[Sequence[float]]) -> Tensor:
    """Concatenate log-probs of several sequences in fp64."""
    return torch.cat([torch.as_tensor(value, dtype=torch.float64) for value in values])


def gap(actual: Tensor, expected: Tensor) -> float:
    """Return the mean gap, with each token's gap clamped to MAX_GAP."""
    return float((actual - expected).abs().clamp(max=MAX_GAP).mean())
