"""What replaces the residual stream of a transformer."""
