"""Rows of a table of weights."""
