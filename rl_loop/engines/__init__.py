"""Rollout engines: token ids in, token ids and log-probs out."""

from rl_loop.engines.protocol import GenerateRequest, GenerateResult, RolloutEngine, SamplingParams

__all__ = ["GenerateRequest", "GenerateResult", "RolloutEngine", "SamplingParams"]
