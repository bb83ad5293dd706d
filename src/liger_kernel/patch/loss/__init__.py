"""The loss of a causal model, computed in its head."""
