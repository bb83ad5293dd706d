"""Metrics of a training run: tokens a second, model FLOPs utilisation, memory.

``liger_kernel.transformers.LigerMetrics`` is the callback for the Trainer,
``liger_kernel.metrics.lightning`` has the one for Lightning. In your own training loop,
`meter.Meter` counts, and `flops.flops_of` returns a model's operations.
"""
