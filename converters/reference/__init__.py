"""The arithmetic of each family, written out from its definition."""
