"""Predictions of memory and time from the configuration alone."""
