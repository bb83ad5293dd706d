"""Preference, policy and distillation losses over token log-probabilities."""
