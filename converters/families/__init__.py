"""Name tables and references of each model family."""
