"""How a part of a model is proved, and how it is replaced."""
