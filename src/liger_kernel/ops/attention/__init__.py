"""Attention over some neighbours, and over scores that a convolution mixes."""
