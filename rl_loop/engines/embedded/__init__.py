"""Embedded rollout engine: a transformers model in the process of each rollout worker."""
