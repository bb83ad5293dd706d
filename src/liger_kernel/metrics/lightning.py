"""`LigerMetrics` for Lightning: how fast a run is, and how well it uses the device.

Batches are counted in ``on_train_batch_start``, where the Lightning Trainer hands them over; the
model has no hook. The figures are logged by ``pl_module.log_dict`` in the batches in which
Lightning logs, so every logger gets them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from liger_kernel.metrics.checks import check, known_flops, known_peak, shifts_labels
from liger_kernel.metrics.meter import Meter, Totals
from liger_kernel.metrics.prometheus import Endpoint, values_of

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

logger = logging.getLogger("liger_kernel")


class LigerMetrics(Callback):
    """Adds to what a Lightning Trainer logs: tokens a second, model FLOPs utilisation, peak memory.

    ``Trainer(..., callbacks=[LigerMetrics()])``. The names are those of
    ``liger_kernel.transformers.LigerMetrics``; the figures are of all ranks, since the last log,
    without validation. The model whose operations are counted is the first Hugging Face model that
    the LightningModule holds.

    Args:
        inputs_of: what the model is given, made of a batch, for batches that are no mapping with
        ``input_ids`` and
            ``labels`` themselves.
        prefix: stands before each name, such as "train/".
        prometheus_port: of an HTTP endpoint for Prometheus on rank 0, 0 for a free one, None for no
        endpoint. Where it
            is says ``metrics.endpoint``.
        prometheus_host: the address it listens on; "" is every address.
        peak_flops: FLOP/s of one device, for devices and dtypes that have no known peak.
        flops_per_token: of forward and backward, instead of what is counted of the model.
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
        self.inputs_of, self.prefix = inputs_of, prefix
        self.port, self.host = prometheus_port, prometheus_host
        self.peak_flops, self.flops_per_token, self.attention = (
            peak_flops,
            flops_per_token,
            attention,
        )
        self.totals, self._restored = asdict(Totals()), False
        self.endpoint: Endpoint | None = None
        self._meter, self._step = None, 0

    def on_train_start(self, trainer, pl_module):
        self._close()
        if not self._restored:
            self.totals = asdict(Totals())
        self._restored, self._step = False, trainer.global_step
        model = model_of(pl_module)
        flops = known_flops(model, self.flops_per_token, trainer.is_global_zero)
        dtype = dtype_of(str(trainer.precision))
        self._meter = Meter(
            pl_module.device,
            flops,
            peak=known_peak(self.peak_flops, pl_module.device, dtype, trainer.is_global_zero),
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
                f"LigerMetrics: a batch is a {type(batch).__name__}; give inputs_of, a function that makes a dict with "
                "input_ids and labels of it"
            )
        self._meter.count(inputs)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._meter.tick()
        stepped, self._step = trainer.global_step > self._step, trainer.global_step
        if not (
            stepped and trainer._logger_connector.should_update_logs
        ):  # as Lightning's own callbacks ask
            return
        found = self._meter.take()
        total = Totals(**self.totals)
        total.add(found)
        self.totals, report = asdict(total), found.report()
        logs = report | {"total_tokens": float(total.tokens)}
        if total.labelled:
            logs["total_label_tokens"] = float(total.label_tokens)
        pl_module.log_dict(
            {f"{self.prefix}{name}": value for name, value in logs.items()},
            on_step=True,
            on_epoch=False,
        )
        if self.endpoint is not None:
            at = dict(step=trainer.global_step, epoch=trainer.current_epoch)
            self.endpoint.update(values_of(report, self.totals, at))

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
        self.totals, self._restored = asdict(Totals()) | state_dict["totals"], True

    def _close(self):
        self._meter = None
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None


def model_of(pl_module: torch.nn.Module) -> torch.nn.Module:
    """The Hugging Face model in it, or itself."""
    for module in pl_module.modules():
        if hasattr(getattr(module, "config", None), "to_dict") and hasattr(
            module, "get_output_embeddings"
        ):
            return module
    return pl_module


def dtype_of(precision: str) -> torch.dtype | None:
    """What products are computed in, of a Lightning Trainer's ``precision``; None of those that
    have no known peak."""
    for start, dtype in (("bf16", torch.bfloat16), ("16", torch.float16), ("32", torch.float32)):
        if precision.startswith(start):
            return dtype
    return None
