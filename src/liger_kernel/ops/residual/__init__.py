"""Replacements for the residual stream of a transformer."""
