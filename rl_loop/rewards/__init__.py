"""Judging answers. Nothing here needs Ray, Megatron or torch."""

from rl_loop.rewards.failure import CheckerFailure

__all__ = ["CheckerFailure"]
