"""Recurrent layers: short causal convolutions and linear attention."""
