"""Sink logit for ablations without sinks. Imports nothing, so that engines can use it, too."""

NO_SINK = -1e4
"""Sink logit that takes no attention."""
