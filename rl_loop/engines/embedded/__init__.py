"""The embedded rollout engine: a model of transformers in the worker's process."""
