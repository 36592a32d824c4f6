"""Measuring a policy, and comparing an engine with the trainer."""
