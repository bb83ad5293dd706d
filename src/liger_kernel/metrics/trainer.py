"""`LigerMetrics` for the Trainer: how fast a run is, and how well it uses the device.

The Trainer gives callbacks no inputs. So while it trains, two of its methods are wrapped, on this
one object: ``compute_loss``, which every Trainer calls with the tensors of a micro-batch, outside
of what is compiled and above DDP and FSDP; and ``log``, so that the history and every integration
of ``report_to`` get the figures. The model has no hook. Both are given back at the end."""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import asdict

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.training_args import ParallelMode

from liger_kernel.metrics.checks import check, dtype_of, known_flops, known_peak, shifts_labels
from liger_kernel.metrics.meter import Meter, Totals
from liger_kernel.metrics.prometheus import Endpoint, values_of

logger = logging.getLogger("liger_kernel")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WRAPPED = "compute_loss", "log"


class LigerMetrics(TrainerCallback, ExportableState):
    """Adds to what the Trainer logs: tokens a second, model FLOPs utilisation, peak memory.

    ``Trainer(..., callbacks=[LigerMetrics()])``. The figures are those of all processes together,
    since the last log; evaluation and saving are not counted. They stand in
    ``trainer.state.log_history`` and go wherever ``report_to`` sends the loss:
    ``tokens_per_second`` (without padding), ``label_tokens_per_second`` (what the loss is computed
    of), ``tflops_per_device`` and ``mfu``, ``hfu`` if layers are checkpointed, ``peak_memory_gib``,
    ``total_tokens``, ``total_label_tokens``. The Trainer's last line gets those of the whole run,
    as ``train_tokens_per_second`` and so on. What is not known, such as ``mfu`` on an unknown
    device, is left out, and a warning says why.

    Args:
        prometheus_port: of an HTTP endpoint for Prometheus on rank 0, 0 for a free one, None for no
        endpoint. Where it
            is says ``metrics.endpoint``.
        prometheus_host: the address it listens on; "" is every address.
        peak_flops: FLOP/s of one device, for devices and dtypes that have no known peak.
        flops_per_token: of forward and backward, instead of what is counted of the model.
        attention: "causal" counts the pairs of tokens that the mask lets through, "full" every pair
        of a sequence, as
            the formula of the PaLM paper does.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        prometheus_port: int | None = None,
        prometheus_host: str = "127.0.0.1",
        peak_flops: float | None = None,
        flops_per_token: float | None = None,
        attention: str = "causal",
    ):
        check(prometheus_port, peak_flops, flops_per_token, attention)
        self.arguments = dict(
            prometheus_port=prometheus_port, prometheus_host=prometheus_host, peak_flops=peak_flops,
            flops_per_token=flops_per_token, attention=attention,
        )  # fmt: skip
        self.totals = asdict(Totals())  # of the run, with what was trained before a checkpoint
        self.endpoint: Endpoint | None = None
        self._trainer = self._meter = None
        self._interval, self._session = Totals(), Totals()

    # ---- the Trainer's events ----

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._detach()
        trainer = trainer_of(self)
        if trainer is None:
            raise RuntimeError(
                "LigerMetrics: it was called by no Trainer; give it as Trainer(callbacks=[LigerMetrics()])"
            )
        self.totals = asdict(Totals())
        if state.global_step:  # of the checkpoint
            saved = state.stateful_callbacks.get(type(self).__name__) or {}
            saved = saved[0] if isinstance(saved, list) else saved
            self.totals |= saved.get("attributes", {}).get("totals", {})
        self._interval, self._session = Totals(), Totals()
        given = self.arguments
        flops = known_flops(model, given["flops_per_token"], state.is_world_process_zero)
        precision = trainer.accelerator.mixed_precision  # or fp8, whose peak is no 16-bit peak
        dtype = dtype_of(model) if precision == "no" else DTYPES.get(precision)
        self._meter = Meter(
            args.device,
            flops,
            peak=known_peak(given["peak_flops"], args.device, dtype, state.is_world_process_zero),
            devices=max(1, args.n_gpu),
            attention=given["attention"],
            replicas=trainer.get_tp_size() if hasattr(trainer, "get_tp_size") else 1,
            ranks=args.parallel_mode == ParallelMode.DISTRIBUTED
            and torch.distributed.is_initialized(),
            shifted=getattr(trainer, "_loss_shifts_labels", False) or shifts_labels(model),
        )
        if given["prometheus_port"] is not None and state.is_world_process_zero:
            self.endpoint = Endpoint(given["prometheus_port"], given["prometheus_host"])
            logger.info("LigerMetrics: %s", self.endpoint.url)
        self._attach(trainer)
        self._meter.resume()

    def on_step_end(self, args, state, control, **kwargs):
        # what comes before the next one is training, unless an evaluation says otherwise
        self._meter.tick()
        if control.should_log or control.should_evaluate or control.should_save:
            # here, where all ranks come by, and before anything takes time that is no training
            self._gather()

    def on_epoch_end(self, args, state, control, **kwargs):
        self._meter.tick()
        self._gather()

    def on_evaluate(self, args, state, control, **kwargs):
        if self._meter is not None:
            self._meter.resume()

    on_save = on_predict = on_evaluate

    def on_train_end(self, args, state, control, **kwargs):
        self._detach()

    # ---- what is counted, what is logged ----

    def _count(self, model, inputs):
        if model.training and self._meter is not None:
            self._meter.count(inputs, tuple(self._trainer.label_names or ()) + ("labels",))

    def _gather(self):
        found = self._meter.take()
        self._interval.add(found)
        self._session.add(found)
        total = Totals(**self.totals)
        total.add(found)
        self.totals = asdict(total)

    def _add_to(self, logs: dict) -> None:
        if not isinstance(logs, dict):
            return
        if "loss" in logs and self._interval.seconds:
            report = self._interval.report()
            self._interval = Totals()
            logs.update(report, total_tokens=self.totals["tokens"])
            if self.totals["labelled"]:
                logs["total_label_tokens"] = self.totals["label_tokens"]
            if self.endpoint is not None:
                state = self._trainer.state
                at = dict(step=state.global_step, epoch=state.epoch)
                self.endpoint.update(values_of(report, self.totals, logs | at))
        elif "train_runtime" in logs:
            for name, value in self._session.report().items():
                logs.setdefault(name if name == "peak_memory_gib" else f"train_{name}", value)

    def _attach(self, trainer):
        own_loss, own_log = trainer.compute_loss, trainer.log

        @functools.wraps(own_loss)
        def compute_loss(model, inputs, *args, **kwargs):
            self._count(model, inputs)
            return own_loss(model, inputs, *args, **kwargs)

        @functools.wraps(own_log)
        def log(logs, *args, **kwargs):
            self._add_to(logs)
            return own_log(logs, *args, **kwargs)

        self._trainer = trainer
        self._wraps = {
            name: (trainer.__dict__.get(name), mine)
            for name, mine in zip(WRAPPED, (compute_loss, log), strict=True)
        }
        for name, (_, mine) in self._wraps.items():
            setattr(trainer, name, mine)

    def _detach(self):
        """Also of a training that has failed, at the next one's beginning."""
        if self._trainer is not None:
            for name, (before, mine) in self._wraps.items():
                if self._trainer.__dict__.get(name) is not mine:
                    # somebody has wrapped it since: ours goes on handing on, and counts nothing
                    continue
                if before is None:
                    delattr(self._trainer, name)
                else:
                    setattr(self._trainer, name, before)
        self._trainer = self._meter = None
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None

    def state(self) -> dict:
        """What a checkpoint keeps."""
        return {"args": dict(self.arguments), "attributes": {"totals": dict(self.totals)}}


def trainer_of(callback):
    """The Trainer that is calling: no event is told it."""
    frame = sys._getframe(1)
    while frame is not None:
        handler = getattr(frame.f_locals.get("self"), "callback_handler", None)
        if handler is not None and any(one is callback for one in handler.callbacks):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
