"""The beginning and the end of a run: checks, resuming, signals, errors."""
