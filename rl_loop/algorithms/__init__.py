"""Advantages, policy losses and mismatch metrics as pure functions on tensors."""

__all__ = ["advantages", "policy_loss", "sequences"]
