"""The closed loop of agentic RL: agent episodes -> trajectories -> advantages -> update -> weight
sync."""
