"""Attention without sinks, as ablations of trainer and engines have it. Nothing is imported here."""

NO_SINK = -1e4
"""A sink logit that takes no attention."""
