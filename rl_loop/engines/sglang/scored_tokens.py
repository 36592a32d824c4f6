"""What SGLang answers when it scores a prompt."""

from collections.abc import Sequence
from typing import Any

from rl_loop.engines.sglang.client import ServerFailed


def log_probs_of(
    entries: Sequence[Sequence[Any]], input_ids: Sequence[int], url: str
) -> list[float]:
    """Read log p(input_ids[i] | input_ids[:i]) for i >= 1 from ``input_token_logprobs``.

    SGLang 0.5.17 answers with the id 0 where the last one of the vocabulary was sent
    (``logprob_result_processor.py`` takes ids from there on for those of pictures); the log-prob is
    that of the token.

    Args:
        entries: [log-prob, token id, text] of every token; the first has no log-prob.
        input_ids: that were sent.
        url: of the server.

    Raises ServerFailed if other tokens were scored."""
    scored = [entry[1] for entry in entries]
    last = max(input_ids)
    if scored not in (list(input_ids), [0 if i == last else i for i in input_ids]):
        raise ServerFailed(f"{url}: the scored tokens are not those that were sent")
    return [float(entry[0]) for entry in entries[1:]]
