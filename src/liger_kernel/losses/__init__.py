"""Losses as formulas over token log-probabilities: preference, policy, distillation, Medusa."""
