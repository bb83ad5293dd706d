"""Normalisation of rows: RMSNorm, with and without a residual addition, LayerNorm, GroupNorm."""
