"""The embedded rollout engine: transformers' GPT-OSS with continuous batching, in the worker's process."""
