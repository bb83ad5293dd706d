"""Attention in a neighbourhood, multi-token attention, and attention by groups of heads."""
