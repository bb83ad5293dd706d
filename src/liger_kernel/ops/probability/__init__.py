"""Probabilities of rows."""
