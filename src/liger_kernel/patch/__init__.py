"""What a model has of our operators is proved, and put into it."""
