"""Data of a training step: trajectories and training samples."""
