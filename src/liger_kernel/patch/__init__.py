"""Proves which parts of a model compute what our operators compute, and replaces them."""
