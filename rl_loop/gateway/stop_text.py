"""Ends a sampled turn at a stop text, as if the policy had stopped sampling there.

The engine samples the whole turn. The tokens after the stop text are dropped before the turn is
recorded, so they are neither returned nor counted nor trained on. The remaining tokens are samples
of the policy with unchanged log-probs: the end depends only on tokens before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from rl_loop.chat.codec import ChatCodec
from rl_loop.data.trajectory import WeightVersionSpan
from rl_loop.engines.protocol import GenerateResult


@dataclass(frozen=True)
class StopCut:
    """Position of a stop text in a sampled turn."""

    kept: int
    """Number of tokens of the turn up to the end of the stop text."""
    dropped: int
    """Number of the last kept tokens that contain bytes of the stop text. A prompt leaves them out."""
    text: str
    """Text of the last message before the stop text."""
    rest: str
    """End of ``text`` whose bytes are in the first of the dropped tokens."""


def find_stop(
    codec: ChatCodec, ids: Sequence[int], ranges: Sequence[range], stop: Sequence[str]
) -> StopCut | None:
    """Find the stop text that ends first in the texts for the client. None if there is none.

    Args:
        codec: chat format of the policy.
        ids: sampled turn.
        ranges: positions of the texts.
        stop: stop texts. If two end at the same byte, the longer one counts.
    """
    # Bytes instead of characters: a stop text may begin or end within a token, and a token may hold
    # a part of a character.
    searched = [text.encode(errors="replace") for text in stop]
    for places in ranges:
        pieces = [codec.vocabulary.token_bytes(ids[place]) for place in places]
        data = b"".join(pieces)
        matches = [
            (begin + len(text), begin) for text in searched if (begin := data.find(text)) >= 0
        ]
        if not matches:
            continue
        # The first end counts, because sampling with stop texts would have ended there.
        end, begin = min(matches)
        ends = list(accumulate(map(len, pieces)))
        # First and last token with bytes of the stop text. The first one may begin with text that
        # the client gets.
        first = sum(token_end <= begin for token_end in ends)
        last = sum(token_end < end for token_end in ends)
        return StopCut(
            kept=places.start + last + 1,
            dropped=last - first + 1,
            text=data[:begin].decode(errors="replace"),
            rest=data[ends[first] - len(pieces[first]) : begin].decode(errors="replace"),
        )
    return None


def shorten(result: GenerateResult, kept: int) -> GenerateResult:
    """Return the first tokens of a result, with their log-probs, versions and experts."""
    routes = result.routed_experts
    if routes is not None:
        # Counted from the end: routes begin with the first token whose experts no earlier turn has
        # returned, which may be in the prompt.
        routes = routes[: len(routes) - (len(result.output_ids) - kept)]
    return replace(
        result,
        output_ids=result.output_ids[:kept],
        output_log_probs=result.output_log_probs[:kept],
        weight_versions=[
            WeightVersionSpan(span.start, min(span.end, kept), span.version)
            for span in result.weight_versions
            if span.start < kept
        ],
        routed_experts=routes,
    )
