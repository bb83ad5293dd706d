"""Aliases of `liger_kernel.patch.loss.causal_lm`, under their published names."""
