"""Rotary position embeddings, alone and together with the norms of queries and keys."""
