"""Titles of the checks. The checks of forward.py have their own titles."""

TITLES = {
    "agreement": "log-probs of every position and class of token",
    "packing": "sequences in one row do not see one another",
    "routes returned": "routed experts that come back",
    "routes given": "routed experts that are given (routing replay)",
    "harmony": "Harmony's special tokens",
    "decoding": "tokens that are decoded one by one, across the window's edge",
    "determinism": "the same numbers again, alone and among others",
    "gradients": "sinks in the backward pass, and all other gradients",
    "update": "an update of all weights, and back",
}
"""Titles by name of the check."""
