"""How a run goes: tokens a second, model FLOPs utilisation, memory.

``liger_kernel.transformers.LigerMetrics`` is the callback for the Trainer,
``liger_kernel.metrics.lightning`` has that for Lightning. For a training loop of one's own:
`meter.Meter` counts, `flops.flops_of` knows a model's operations."""
