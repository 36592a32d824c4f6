"""Log-probs of an answer's tokens, in the form of OpenAI's API."""

from dataclasses import dataclass
from typing import Any

from rl_loop.chat.codec import ChatCodec
from rl_loop.engines.protocol import GenerateResult


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """One sampled token of a text."""

    token: bytes
    """UTF-8 of the token, possibly a part of a character."""
    log_prob: float
    """Log-prob as the engine returned it, in nats."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry of OpenAI's API."""
        try:
            text = self.token.decode()
        except UnicodeDecodeError:
            # OpenAI writes the bytes of a part of a character in this form.
            text = "".join(f"\\x{byte:02x}" for byte in self.token)
        return {
            "token": text,
            "logprob": self.log_prob,
            "bytes": list(self.token),
            "top_logprobs": [],
        }


type TextLogProbs = tuple[TokenLogProb, ...]
"""Tokens of one text of an answer, in their order."""


def text_log_probs(
    codec: ChatCodec, result: GenerateResult, stop_tokens: int
) -> tuple[TextLogProbs, ...]:
    """Return the tokens of every text for the client.

    Args:
        codec: chat format of the policy.
        result: the sampled turn.
        stop_tokens: number of tokens at the end that begin within a stop text.
    """
    end = len(result.output_ids) - stop_tokens
    return tuple(
        tuple(
            TokenLogProb(
                codec.vocabulary.token_bytes(result.output_ids[place]),
                result.output_log_probs[place],
            )
            for place in places
            if place < end
        )
        for places in codec.answer_ranges(result.output_ids)
    )
