"""What is certified: the protocol that a trainer or an engine speaks to be looked at."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from megatron_gptoss.user_error import UserError
from rl_loop.certify.harmony_tokens import HarmonyMessage


class NotOffered(NotImplementedError):
    """The subject has no such thing; the checks that need it are skipped and say so."""


class SubjectFailed(UserError, RuntimeError):
    """The subject did not answer, or answered what cannot be an answer."""


@dataclass(frozen=True)
class Scored:
    """What a subject says of a text of n tokens."""

    log_probs: Sequence[float]
    """n - 1 natural logs: entry i is log p(token i + 1 | tokens 0..i), at temperature 1."""
    routes: np.ndarray | None = None
    """Integers [n - 1, layers, top_k]: the experts of every input, in any order; None if the
    subject does not tell."""


@dataclass(frozen=True)
class Generated:
    """What a subject sampled."""

    ids: Sequence[int]
    log_probs: Sequence[float] = field(default=())
    """Natural logs, one for each id."""


class Subject:
    """A trainer or an engine. Only ``score`` is needed; each other method adds checks.

    All methods are about the weights of the directory that the subject was given, or last
    ``update``d to. Batches may be computed together or one after the other.
    """

    name = "a subject"
    is_deterministic = False
    """Whether it claims equal bits whatever else it computes."""

    def score(self, texts: Sequence[Sequence[int]]) -> list[Scored]:
        """Score texts, each as if it were alone."""
        raise NotImplementedError

    def score_packed(self, texts: Sequence[Sequence[int]]) -> list[Scored]:
        """Score texts that lie end to end in one row."""
        self._refuse("packed rows")

    def score_with_routes(
        self, texts: Sequence[Sequence[int]], routes: Sequence[np.ndarray]
    ) -> list[Scored]:
        """Score texts with the experts int64 [n - 1, layers, top_k] instead of the router's."""
        self._refuse("routes that are given")

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Generated:
        """Continue a prompt greedily, token by token; no token ends it."""
        self._refuse("generation")

    def gradients(self, texts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Compute the gradients of the mean of -log p over all predicted tokens of all texts.

        By Hugging Face name and in Hugging Face's layout; the weights stay as they are.
        """
        self._refuse("gradients")

    def update(self, directory: Path) -> None:
        """Take the weights of another Hugging Face directory of the same architecture."""
        self._refuse("an update of its weights")

    def render(self, messages: Sequence[HarmonyMessage]) -> list[int]:
        """Return the token ids of a conversation."""
        self._refuse("rendering of conversations")

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text in which the names of special tokens mean the tokens."""
        self._refuse("tokenizing")

    def close(self) -> None:
        """Release everything."""

    def _refuse(self, what: str) -> NoReturn:
        raise NotOffered(f"{self.name} does not offer {what}")


def checked_scores(
    subject: Subject, scores: Sequence[Scored], texts: Sequence[Sequence[int]]
) -> list[Scored]:
    """Return the scores if they can be some of these texts. Raises SubjectFailed if not."""
    if len(scores) != len(texts):
        raise SubjectFailed(f"{subject.name} gave {len(scores)} answers for {len(texts)} texts")
    for scored, text in zip(scores, texts, strict=True):
        values = np.asarray(scored.log_probs, dtype=np.float64)
        if values.shape != (len(text) - 1,):
            raise SubjectFailed(
                f"{subject.name} gave {values.shape} log-probs for a text of {len(text)} tokens, "
                f"expected {len(text) - 1}"
            )
        if not np.isfinite(values).all():
            position = int(np.isfinite(values).argmin())
            raise SubjectFailed(
                f"{subject.name}: the log-prob of token {position + 1} is {values[position]}"
            )
    return list(scores)
