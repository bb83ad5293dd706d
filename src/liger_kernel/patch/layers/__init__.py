"""The rewrites of layers: a file for each."""
