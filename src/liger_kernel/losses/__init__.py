"""Losses as mathematics over token log-probabilities: preference, policy, distillation."""
