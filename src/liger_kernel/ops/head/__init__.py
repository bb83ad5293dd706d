"""The linear head: logits a chunk at a time, and the losses that are made of them."""
