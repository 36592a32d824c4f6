"""Episodes of external agents.

A process runs the agents, a gateway serves the policy to them, and the sampled turns become
trajectories.
"""
