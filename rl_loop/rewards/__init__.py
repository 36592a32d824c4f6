"""Judgment of answers. This package does not need Ray, Megatron or torch."""

from rl_loop.rewards.checker_pool import CheckerError

__all__ = ["CheckerError", "math_answer"]
