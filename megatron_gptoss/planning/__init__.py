"""Predictions of memory and time of a training step from the configuration."""
