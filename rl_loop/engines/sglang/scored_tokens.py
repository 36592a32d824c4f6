"""Reader of SGLang's prompt log-probs."""

from collections.abc import Sequence
from typing import Any

from rl_loop.engines.sglang.client import ServerError


def parse_log_probs(
    entries: Sequence[Sequence[Any]], input_ids: Sequence[int], url: str
) -> list[float]:
    """Return log p(input_ids[i] | input_ids[:i]) for i >= 1 from ``input_token_logprobs``.

    Args:
        entries: [log-prob, token id, text] of every token. The first has no log-prob.
        input_ids: tokens that were sent.
        url: address of the server.

    Raises:
        ServerError: if different tokens were scored.
    """
    scored = [entry[1] for entry in entries]
    # SGLang 0.5.17 returns id 0 for the largest id of the vocabulary, because
    # ``logprob_result_processor.py`` treats ids from there on as images. The log-prob is that of
    # the token that was sent.
    last = max(input_ids)
    if scored not in (list(input_ids), [0 if i == last else i for i in input_ids]):
        raise ServerError(f"{url}: the server scored different tokens than those of the request")
    return [float(entry[0]) for entry in entries[1:]]
