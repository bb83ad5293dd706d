"""Gated MLPs."""
