"""The closed loop of agentic RL: agent episodes -> trajectories -> advantages -> update -> weight
sync."""

import megatron_gptoss  # noqa: F401 (before Megatron, which needs no compiler without a GPU)
