"""Aliases of `liger_kernel.transformers.causal_lm`, under their published names."""
