"""Evaluation of a policy, and comparison of an engine with the trainer."""
