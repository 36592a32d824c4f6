"""Episodes of agents that are programs of their own: a process that runs them, a gateway that they
talk to, and trajectories of what was sampled for them."""
