"""What flows through a step: trajectories and training samples."""
