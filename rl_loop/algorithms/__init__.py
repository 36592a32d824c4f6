"""Advantages, policy losses and mismatch metrics as pure functions on tensors."""
