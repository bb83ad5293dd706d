"""Proofs that a module computes what our operators compute, and how it is replaced."""
