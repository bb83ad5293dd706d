"""The published functions: for any model, for each family, and forwards to bind to a class."""
