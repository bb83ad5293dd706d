"""Aliases of `liger_kernel.patch.causal_lm`, under their published names."""
