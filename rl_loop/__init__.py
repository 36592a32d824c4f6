"""Closed loop of agentic RL: episodes -> trajectories -> advantages -> update -> weight sync."""

import megatron_gptoss  # noqa: F401 (before Megatron, which needs no compiler without a GPU)
