"""Interface of trainers and engines that ``gptoss certify`` can check."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from megatron_gptoss.user_error import UserError
from rl_loop.certify.harmony_tokens import HarmonyMessage


class UnsupportedOperationError(NotImplementedError):
    """Operation that the implementation does not support. Checks that need it are skipped."""


class ImplementationError(UserError, RuntimeError):
    """Implementation that did not answer, or gave an invalid answer."""


@dataclass(frozen=True)
class ScoredSequence:
    """Log-probs of an implementation for a sequence of n tokens."""

    log_probs: Sequence[float]
    """n - 1 natural logs: entry i is log p(token i + 1 | tokens 0..i) at temperature 1."""
    routes: np.ndarray | None = None
    """Integers [n - 1, layers, top_k]: experts of every input, in any order. None if the implementation
    does not report them."""


@dataclass(frozen=True)
class SampledSequence:
    """Sampled continuation."""

    ids: Sequence[int]
    log_probs: Sequence[float] = field(default=())
    """Natural logs, one per id."""


class ModelImplementation:
    """Base class of trainers and engines. Only ``score`` is required; other methods add checks.

    All methods use the weights of the directory given at the start, or of the last
    ``load_weights``. Implementations may compute sequences in batches or one after another.
    """

    name = "an implementation"
    is_deterministic = False
    """True if the implementation claims bitwise equal results, whatever else it computes."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        """Score each sequence independently."""
        raise NotImplementedError

    def score_packed(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        """Score sequences that are concatenated in one packed row."""
        self._reject("packed rows")

    def score_with_routes(
        self, sequences: Sequence[Sequence[int]], routes: Sequence[np.ndarray]
    ) -> list[ScoredSequence]:
        """Score sequences with given experts instead of the router's choice.

        Args:
            sequences: token ids.
            routes: int64 [n - 1, layers, top_k] for each sequence of n tokens.
        """
        self._reject("given routes")

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> SampledSequence:
        """Continue a prompt greedily. No token stops generation."""
        self._reject("generation")

    def gradients(self, sequences: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return the gradients of the mean of -log p over all predicted tokens of all sequences.

        They have the names and layouts of Hugging Face. The weights do not change.
        """
        self._reject("gradients")

    def load_weights(self, directory: Path) -> None:
        """Load the weights of another Hugging Face directory with the same architecture."""
        self._reject("an update of its weights")

    def render(self, messages: Sequence[HarmonyMessage]) -> list[int]:
        """Return the token ids of a conversation."""
        self._reject("rendering of conversations")

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text. Names of special tokens in it mean the tokens."""
        self._reject("tokenizing")

    def close(self) -> None:
        """Release all resources."""

    def _reject(self, what: str) -> NoReturn:
        raise UnsupportedOperationError(f"{self.name} does not support {what}")


def checked_scores(
    implementation: ModelImplementation,
    scores: Sequence[ScoredSequence],
    sequences: Sequence[Sequence[int]],
) -> list[ScoredSequence]:
    """Return the scores. Raises ImplementationError if they do not fit the sequences."""
    # Implementations are servers and code of users, so check the answers before they are compared.
    if len(scores) != len(sequences):
        raise ImplementationError(
            f"{implementation.name} gave {len(scores)} answers for {len(sequences)} sequences"
        )
    for scored, sequence in zip(scores, sequences, strict=True):
        values = np.asarray(scored.log_probs, dtype=np.float64)
        if values.shape != (len(sequence) - 1,):
            raise ImplementationError(
                f"{implementation.name} gave {values.shape} log-probs for a sequence of {len(sequence)} tokens, "
                f"expected {len(sequence) - 1}"
            )
        # In a mean over tokens, NaN would not show its position.
        if not np.isfinite(values).all():
            position = int(np.isfinite(values).argmin())
            raise ImplementationError(
                f"{implementation.name}: the log-prob of token {position + 1} is {values[position]}"
            )
    return list(scores)
