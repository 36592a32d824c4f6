"""Titles of the checks. The checks of forward.py have their own titles."""

TITLES = {
    "agreement": "log-probs of every position and class of token",
    "packing": "sequences in one packed row do not attend to each other",
    "routes returned": "returned routed experts",
    "routes given": "given routed experts (routing replay)",
    "harmony": "Harmony's special tokens",
    "decoding": "tokens decoded one by one, across the window's edge",
    "determinism": "equal log-probs alone and in other batches",
    "gradients": "sinks in the backward pass, and all other gradients",
    "update": "an update of all weights, and its reversal",
}
"""Titles by name of the check."""
