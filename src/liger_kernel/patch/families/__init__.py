"""The published functions: one for each family, and those for a whole class of models."""
