"""Faults on purpose, for experiments that show what they do."""
