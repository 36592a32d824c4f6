"""The embedded rollout engine: transformers' GPT-OSS in the worker's process."""
