"""Rotary position embeddings, alone and with the norms of queries and keys."""
