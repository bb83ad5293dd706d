"""`LigerMetrics` for Lightning: the speed of a run, and how well it uses the device.

Batches are counted in ``on_train_batch_start``; the model has no hook. The metrics are logged by
``pl_module.log_dict`` in the batches in which Lightning logs, so every logger gets them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from liger_kernel.metrics.checks import check, flops_or_none, peak_or_none, shifts_labels
from liger_kernel.metrics.meter import Meter, Totals
from liger_kernel.metrics.prometheus import Endpoint, values_of

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

logger = logging.getLogger("liger_kernel")


class LigerMetrics(Callback):
    """Logs tokens a second, model FLOPs utilisation and peak memory, by the Lightning Trainer.

    ``Trainer(..., callbacks=[LigerMetrics()])``. The names are those of
    ``liger_kernel.transformers.LigerMetrics``; the figures are of all ranks, since the last log,
    without validation. The model whose operations are counted is the first Hugging Face model in
    the LightningModule.

    Args:
        inputs_of: ``inputs_of(batch)`` returns the model's inputs. Needed for batches that are no
            mapping with ``input_ids`` and ``labels`` themselves.
        prefix: of each name, such as "train/".
        prometheus_port: port of an HTTP endpoint for Prometheus on rank 0; 0 for a free one, None
            for no endpoint. ``metrics.endpoint`` has its address.
        prometheus_host: the address it listens on; "" is every address.
        peak_flops: FLOP/s of one device, for devices and dtypes that have no known peak.
        flops_per_token: operations of forward and backward, in place of counting the model's.
        attention: "causal" counts the pairs of tokens that the mask lets through, "full" every pair
            of a sequence.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        inputs_of: Callable[[Any], Mapping] | None = None,
        prefix: str = "",
        prometheus_port: int | None = None,
        prometheus_host: str = "127.0.0.1",
        peak_flops: float | None = None,
        flops_per_token: float | None = None,
        attention: str = "causal",
    ):
        check(prometheus_port, peak_flops, flops_per_token, attention)
        self.inputs_of = inputs_of
        self.prefix = prefix
        self.port = prometheus_port
        self.host = prometheus_host
        self.peak_flops = peak_flops
        self.flops_per_token = flops_per_token
        self.attention = attention
        self.totals = asdict(Totals())
        self.endpoint: Endpoint | None = None
        self._restored = False  # the totals are those of a checkpoint
        self._meter = None
        self._last_step = 0

    def on_train_start(self, trainer, pl_module):
        self._close()
        if not self._restored:
            self.totals = asdict(Totals())
        self._restored = False
        self._last_step = trainer.global_step
        model = model_of(pl_module)
        flops = flops_or_none(model, self.flops_per_token, trainer.is_global_zero)
        dtype = dtype_of(str(trainer.precision))
        self._meter = Meter(
            pl_module.device,
            flops,
            peak=peak_or_none(self.peak_flops, pl_module.device, dtype, trainer.is_global_zero),
            attention=self.attention,
            ranks=trainer.world_size > 1,
            shifted=shifts_labels(model),
        )
        if self.port is not None and trainer.is_global_zero:
            self.endpoint = Endpoint(self.port, self.host)
            logger.info("LigerMetrics: %s", self.endpoint.url)
        self._meter.resume()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        inputs = self.inputs_of(batch) if self.inputs_of is not None else batch
        if not isinstance(inputs, Mapping):
            raise TypeError(
                f"LigerMetrics: a batch is a {type(batch).__name__}; give inputs_of, a function "
                "that makes a dict with input_ids and labels of it"
            )
        self._meter.count(inputs)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._meter.tick()
        has_stepped = trainer.global_step > self._last_step
        self._last_step = trainer.global_step
        # the condition of Lightning's own callbacks
        if not (has_stepped and trainer._logger_connector.should_update_logs):
            return
        interval = self._meter.take()
        report = interval.report()
        total = Totals(**self.totals)
        total.add(interval)
        self.totals = asdict(total)
        logs = report | {"total_tokens": float(total.tokens)}
        if total.labelled:
            logs["total_label_tokens"] = float(total.label_tokens)
        pl_module.log_dict(
            {f"{self.prefix}{name}": value for name, value in logs.items()},
            on_step=True,
            on_epoch=False,
        )
        if self.endpoint is not None:
            progress = dict(step=trainer.global_step, epoch=trainer.current_epoch)
            self.endpoint.update(values_of(report, self.totals, progress))

    def on_validation_start(self, trainer, pl_module):
        if self._meter is not None:
            self._meter.tick()

    def on_validation_end(self, trainer, pl_module):
        if self._meter is not None:
            self._meter.resume()

    def on_train_end(self, trainer, pl_module):
        self._close()

    def on_exception(self, trainer, pl_module, exception):
        self._close()

    def teardown(self, trainer, pl_module, stage):
        self._close()

    def state_dict(self) -> dict:
        return {"totals": dict(self.totals)}

    def load_state_dict(self, state_dict) -> None:
        self.totals = asdict(Totals()) | state_dict["totals"]
        self._restored = True

    def _close(self):
        self._meter = None
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None


def model_of(pl_module: torch.nn.Module) -> torch.nn.Module:
    """Return the Hugging Face model in the module, or the module itself."""
    for module in pl_module.modules():
        has_config = hasattr(getattr(module, "config", None), "to_dict")
        if has_config and hasattr(module, "get_output_embeddings"):
            return module
    return pl_module


def dtype_of(precision: str) -> torch.dtype | None:
    """Return the dtype of matrix products under a Lightning Trainer's ``precision``.

    It is None for those that have no known peak.
    """
    for start, dtype in (("bf16", torch.bfloat16), ("16", torch.float16), ("32", torch.float32)):
        if precision.startswith(start):
            return dtype
    return None
