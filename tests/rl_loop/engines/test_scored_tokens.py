"""Log-probs in SGLang's responses to scored prompts."""

from __future__ import annotations

import pytest

from rl_loop.engines.sglang.client import ServerError
from rl_loop.engines.sglang.scored_tokens import parse_log_probs

SENT = [5, 511, 0, 511]


def entries(ids: list[int]) -> list[list[float | int | None]]:
    """Return entries in the format of /generate. The first token has no log-prob."""
    return [[-0.5 * i if i else None, token, None] for i, token in enumerate(ids)]


@pytest.mark.parametrize("told", [SENT, [5, 0, 0, 0]], ids=["every id", "0 for the last id"])
def test_scored_tokens_have_their_log_probs(told: list[int]) -> None:
    assert parse_log_probs(entries(told), SENT, "http://server") == [-0.5, -1.0, -1.5]


@pytest.mark.parametrize("told", [[0, 511, 0, 511], [5, 0, 0, 511], [5, 511, 0], [5, 0, 1, 0]])
def test_response_with_other_tokens_is_rejected(told: list[int]) -> None:
    with pytest.raises(ServerError, match="http://server: the server scored different tokens"):
        parse_log_probs(entries(told), SENT, "http://server")
