"""The loss of a causal model, computed in its head. One step is described in `loss_in_head`."""
