"""Ray: start, tokens, placement of actors, and authenticated process groups."""
