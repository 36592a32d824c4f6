"""Log-probs of an answer's tokens, in the form of OpenAI's API."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_loop.chat.codec import ChatCodec, Vocabulary
from rl_loop.engines.protocol import GenerateResult, TokenChoice


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """One sampled token of a text."""

    token: bytes
    """UTF-8 of the token, possibly a part of a character."""
    log_prob: float
    """Log-prob as the engine returned it, in nats."""
    top: tuple[tuple[bytes, float], ...] = ()
    """Most likely tokens of the position with their log-probs, the most likely first."""

    @classmethod
    def of(
        cls, vocabulary: Vocabulary, token: int, log_prob: float, top: Sequence[TokenChoice] = ()
    ) -> "TokenLogProb":
        """Return the entry of a sampled token."""
        return cls(
            vocabulary.token_bytes(token),
            log_prob,
            tuple((vocabulary.token_bytes(other), value) for other, value in top),
        )

    @property
    def entries(self) -> int:
        """Number of tokens in the JSON."""
        return 1 + len(self.top)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of OpenAI's API."""
        top = [_entry(token, log_prob) for token, log_prob in self.top]
        return _entry(self.token, self.log_prob) | {"top_logprobs": top}


def _entry(token: bytes, log_prob: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": log_prob, "bytes": list(token)}


def token_text(token: bytes) -> str:
    """Return a token as text.

    As in OpenAI's API, a token with only a part of a UTF-8 character becomes escapes such as
    ``\\xf0``.
    """
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in token)


type TextLogProbs = tuple[TokenLogProb, ...]
"""Tokens of one text of an answer, in their order."""


def text_log_probs(
    codec: ChatCodec,
    result: GenerateResult,
    ranges: Sequence[range],
    hidden_token_count: int,
    top: Sequence[Sequence[TokenChoice]] = (),
) -> tuple[TextLogProbs, ...]:
    """Return the tokens of every text for the client.

    Args:
        codec: chat format of the policy.
        result: the sampled turn.
        ranges: positions of the texts.
        hidden_token_count: number of tokens at the end of the turn to leave out, because they
            belong to a stop text.
        top: most likely tokens of each position of the turn. Empty if not requested.
    """
    end = len(result.output_ids) - hidden_token_count
    return tuple(
        tuple(
            TokenLogProb.of(
                codec.vocabulary,
                result.output_ids[place],
                result.output_log_probs[place],
                top[place] if top else (),
            )
            for place in places
            if place < end
        )
        for places in ranges
    )
