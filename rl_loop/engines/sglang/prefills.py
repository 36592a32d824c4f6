"""Options of SGLang servers for prefills: CUDA graphs, and gathering of tool outputs.

Turns of a rollout end one by one, and each continues with the prefill of a tool output. A prefill
stops the decoding of all other requests for about one step, even if it has few tokens. Servers
therefore gather requests: they decode up to ``GATHER_PASSES`` - 1 further steps while few requests
wait. Sampling does not change, only the batch in which a request is prefilled.
"""

import json
from collections.abc import Sequence
from itertools import pairwise

PREFILL_GRAPH_TOKENS = 512
"""Default for the largest prefill that colocated servers of GPT-OSS capture, in tokens."""
MIN_PREFILL_GRAPH_TOKENS = 2
"""Smallest captured prefill, in tokens.

A prefill of one token also runs in this graph. It occurs if a prompt's other tokens are cached.
"""
PREFILL_GRAPH_REQUESTS = 64
"""Maximum requests in a captured prefill. SGLang's default is 16. It runs more without a graph."""

GATHERED_SHARE = 0.1
"""Waiting requests, as a fraction of the running requests, at which the server prefills them."""
GATHER_PASSES = 16
"""One more than the decoding steps for which a request waits at most.

Longer waits leave too many requests idle: the expected gain of 32 instead of 16 is 1%
(``launch.rollout_time``).
"""
GATHER_PASSES_OPTION = "--prefill-delayer-max-delay-passes"
NO_OVERLAP_OPTION = "--disable-overlap-schedule"
"""Option of SGLang that excludes gathering."""


def prefill_graph_options(tokens: int) -> list[str]:
    """Return the options of a colocated server that captures prefills of up to ``tokens``.

    By default SGLang splits the graph of a prefill at each attention layer. Split graphs cannot
    release their memory, so servers capture full graphs. A graph runs only prefills of at least
    half its size, so each graph has twice the tokens of the next smaller one.
    """
    if tokens == 0:
        return ["--disable-prefill-cuda-graph"]
    sizes = [tokens]
    while sizes[0] > MIN_PREFILL_GRAPH_TOKENS:
        sizes.insert(0, sizes[0] // 2)
    requests = {"prefill": {"full_prefill_max_req": PREFILL_GRAPH_REQUESTS}}
    return [
        *("--cuda-graph-backend-prefill", "full"),
        *("--cuda-graph-bs-prefill", *map(str, sizes)),
        # The only option of SGLang for the requests of a graph.
        *("--cuda-graph-config", json.dumps(requests)),
        # SGLang would run a prefill of more requests without a graph.
        *("--prefill-max-requests", str(PREFILL_GRAPH_REQUESTS)),
    ]


def gathering_options(arguments: Sequence[str]) -> list[str]:
    """Return the options of a server that gathers requests for a prefill.

    ``GATHERED_SHARE`` does not apply while fewer requests can be admitted than the largest recent
    prefill had. In this case SGLang gathers for the maximum number of steps.

    Args:
        arguments: the user's arguments of the server. Empty result if they exclude gathering.
    """
    if NO_OVERLAP_OPTION in arguments:
        return []
    return [
        "--enable-prefill-delayer",
        *("--prefill-delayer-queue-min-ratio", str(GATHERED_SHARE)),
        *(GATHER_PASSES_OPTION, str(GATHER_PASSES)),
    ]


def gather_passes(arguments: Sequence[str]) -> int:
    """Return ``GATHER_PASSES`` or the user's value. 1 if the server does not gather.

    Args:
        arguments: the user's arguments of the server, as in ``rollout.engine.arguments``.

    Raises:
        ValueError: if the option's value is not a positive whole number.
    """
    if NO_OVERLAP_OPTION in arguments:
        return 1
    value = last_value(arguments, GATHER_PASSES_OPTION)
    if value is None:
        return GATHER_PASSES
    if not value.isdecimal() or int(value) == 0:
        raise ValueError(
            f"rollout.engine.arguments: {GATHER_PASSES_OPTION} is {value}, which is not a positive "
            f"whole number. Set it to a value such as {GATHER_PASSES}, or to 1 for prefills without "
            "delay"
        )
    return int(value)


def last_value(arguments: Sequence[str], option: str) -> str | None:
    """Return the value of an option of SGLang's server. None if it is not given.

    Option and value are two arguments, or one argument ``OPTION=VALUE``. The last value of a
    repeated option counts.
    """
    words = [word for argument in arguments for word in argument.split("=", 1)]
    values = [value for name, value in pairwise(words) if name == option]
    return values[-1] if values else None
