"""Linear layers: several of one input, and with low-rank adapters (LoRA)."""
