"""The rewrites of layers. Each file says which modules it recognises, what runs instead, and in
which cases it leaves a module alone.

    norm, gated_norm             RMSNorm, LayerNorm, gated RMSNorm
    mlp, plain_mlp, tiled_mlp    gated MLPs, MLPs without a gate, MLPs in tiles of tokens
    rope                         rotary position embedding
    experts, router, balancing   mixtures: stacked experts, routers, the load-balancing loss
    mask                         causal masks that attention does not need
    offloading                   checkpoints in the host's memory

A file has its constants, what runs (`Replacement`), how it is found (`Rewrite`), and the trial of
the proof, in this order. Long trials have a file of their own: mlp_trial, rope_trial,
experts_trial, router_trial with router_probe. Shared are activations, dtypes, fan_out (several
linear layers of one input), experts_names and router_logits. experts_interface and experts_by_name
are transformers' ``experts_implementation="liger"``."""
