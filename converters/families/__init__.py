"""Names of weights, and the arithmetic that checks them, family by family."""
