"""Rollouts: the agent loop, and the workers that run it."""
