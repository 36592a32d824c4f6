"""One examination: the subject's answers, the reference's, and how far apart they may be.

A limit is SAFETY times what the reference itself is off when it computes in the subject's
precision, on the same tokens. Faults are looked for where they would show most: on the tokens that
the reference with the fault gives other log-probs than the one without.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rl_loop.certify.certificate import Sight
from rl_loop.certify.faults import Fault
from rl_loop.certify.model import DTYPES, Precision, Weights
from rl_loop.certify.subject import Scored, Subject, checked_scores
from rl_loop.certify.texts import Text, Texts
from rl_loop.certify.variants import EXACT, Evaluated, Reference, Variant, combined
from rl_loop.harmony.vocabulary import Vocabulary

SAFETY = 3.0
"""Times the reference's own error in the subject's precision."""
VISIBLE = 1.5
"""Times the limit: what a fault must move to be looked for."""
FLOORS: dict[Precision, float] = {"fp32": 1e-5, "bf16": 1e-2}
"""No limit is below this, in nats: a few errors of an fp32 log-softmax, or of a bf16 logit."""
TOP = 16
"""Tokens on which a fault is looked for."""
LARGEST_GAP = 1.0
"""Nats that one token counts at most when explanations are compared."""


Which = Literal["exact", "rounded", "updated", "updated_rounded"]
"""One of the references of an examination."""


@dataclass
class Memory:
    """What references have computed."""

    evaluated: dict[tuple[Which, tuple[int, ...], Variant], Evaluated] = field(default_factory=dict)
    gradients: dict[tuple[Which, tuple[tuple[int, ...], ...], Variant], dict[str, Tensor]] = field(
        default_factory=dict
    )


@dataclass
class Examination:
    """All that the checks share."""

    subject: Subject
    weights: Weights
    second: Weights | None
    precision: Precision
    texts: Texts
    vocabulary: Vocabulary | None
    """None if the directory's is not known."""
    explanation: Variant = EXACT
    """The faults that were found, as one variant: later checks compare with that, so that one
    fault is not reported as another."""
    found: list[Fault] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    _scored: dict[tuple[int, ...], Scored] = field(default_factory=dict)

    @cached_property
    def exact(self) -> Reference:
        """The definition in fp64."""
        return Reference(self.weights.config, self.weights.tensors)

    @cached_property
    def rounded(self) -> Reference:
        """The definition in the subject's precision."""
        dtype = DTYPES[self.precision]
        return Reference(self.weights.config, self.weights.tensors, dtype=dtype)

    @cached_property
    def updated(self) -> Reference:
        """The definition in fp64 with the second weights; it knows the first ones, too."""
        assert self.second is not None
        return Reference(self.weights.config, self.second.tensors, self.weights.tensors)

    @cached_property
    def updated_rounded(self) -> Reference:
        """The same in the subject's precision."""
        assert self.second is not None
        dtype = DTYPES[self.precision]
        return Reference(self.weights.config, self.second.tensors, dtype=dtype)

    @property
    def first_directory(self) -> Path:
        """The weights that the subject began with."""
        return self.weights.directory

    def scored(self, texts: Sequence[Text]) -> list[Scored]:
        """Return the subject's scores of texts; each is asked for once."""
        missing = [text.ids for text in texts if text.ids not in self._scored]
        if missing:
            scores = checked_scores(self.subject, self.subject.score(missing), missing)
            self._scored |= zip(missing, scores, strict=True)
        return [self._scored[text.ids] for text in texts]

    def log_probs(self, texts: Sequence[Text]) -> Tensor:
        """Return the subject's log-probs of texts, joined, fp64."""
        return joined([scored.log_probs for scored in self.scored(texts)])

    def evaluated(self, text: Text, variant: Variant = EXACT, which: Which = "exact") -> Evaluated:
        """Return what one of the references computes; it does so once."""
        key = (which, text.ids, variant)
        if key not in self.memory.evaluated:
            reference: Reference = getattr(self, which)
            self.memory.evaluated[key] = reference.evaluate(text.ids, variant)
        return self.memory.evaluated[key]

    def expected(
        self,
        texts: Sequence[Text],
        variant: Variant | None = None,
        which: Which = "exact",
    ) -> Tensor:
        """Return a reference's log-probs of texts, joined, with the faults that were found
        unless others are given."""
        chosen = self.explanation if variant is None else variant
        return torch.cat([self.evaluated(text, chosen, which).log_probs for text in texts])

    def noise(self, texts: Sequence[Text]) -> Tensor:
        """Return the error of the reference in the subject's precision, per token."""
        return (self.expected(texts, EXACT, "rounded") - self.expected(texts, EXACT)).abs()

    def gradients(
        self, texts: Sequence[Text], variant: Variant, which: Which = "exact"
    ) -> dict[str, Tensor]:
        """Return a reference's gradients, by name; they are computed once."""
        key = (which, tuple(text.ids for text in texts), variant)
        if key not in self.memory.gradients:
            reference: Reference = getattr(self, which)
            computed = reference.gradients([text.ids for text in texts], variant)
            self.memory.gradients[key] = computed
        return self.memory.gradients[key]

    def limit(self, noise: Tensor, tokens: Tensor | None = None) -> float:
        """Return what the median gap may be, overall or on some of the tokens."""
        typical = noise.median()
        if tokens is not None:
            typical = torch.maximum(typical, noise[tokens].median())
        return max(SAFETY * float(typical), FLOORS[self.precision])

    def mean_limit(self, noise: Tensor) -> float:
        """Return what the mean of gaps, each counted up to LARGEST_GAP, may be."""
        return max(SAFETY * float(noise.clamp(max=LARGEST_GAP).mean()), FLOORS[self.precision])

    def sights(
        self, faults: Sequence[Fault], texts: Sequence[Text], start: Variant
    ) -> tuple[Sight, ...]:
        """Look for faults beside those of ``start`` in the subject's scores of texts."""

        def with_fault(fault: Fault) -> Tensor:
            return self.expected(texts, combined(start, fault.variant))

        return self.look(
            faults,
            with_fault,
            self.log_probs(texts),
            self.expected(texts, start),
            self.noise(texts),
        )

    def look(
        self,
        faults: Sequence[Fault],
        with_fault: Callable[[Fault], Tensor],
        answered: Tensor,
        expected: Tensor,
        noise: Tensor,
        top: int = TOP,
    ) -> tuple[Sight, ...]:
        """Look for faults in log-probs [tokens].

        Args:
            faults: to look for.
            with_fault: gives the log-probs that a fault would cause.
            answered: by the subject.
            expected: by the reference.
            noise: of the subject's precision.
            top: tokens to look at.
        """
        gaps = (answered - expected).abs()
        sights = []
        for fault in faults:
            moved = (with_fault(fault) - expected).abs()
            tokens = moved.topk(min(top, len(moved))).indices
            visible = float(moved[tokens].median())
            limit = self.limit(noise, tokens)
            sights.append(
                Sight(
                    fault=fault.name,
                    source=fault.source,
                    visible=visible,
                    deviation=float(gaps[tokens].median()),
                    limit=limit,
                    is_visible=visible >= VISIBLE * limit,
                )
            )
        return tuple(sights)


def joined(values: Sequence[Sequence[float]]) -> Tensor:
    """Join log-probs of several texts, fp64."""
    return torch.cat([torch.as_tensor(value, dtype=torch.float64) for value in values])


def gap(answered: Tensor, expected: Tensor) -> float:
    """Return the mean gap, each token counted up to LARGEST_GAP."""
    return float((answered - expected).abs().clamp(max=LARGEST_GAP).mean())
