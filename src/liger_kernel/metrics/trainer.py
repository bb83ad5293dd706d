"""`LigerMetrics` for the Trainer: the speed of a run, and how well it uses the device.

The Trainer gives callbacks neither inputs nor itself. So the callback is made with its Trainer, and
while that trains, two of its methods are wrapped, on this one object: ``compute_loss``, which every
Trainer calls with the tensors of a micro-batch, outside of what is compiled and above DDP and FSDP;
and ``log``, so that the history and every integration of ``report_to`` get the figures. The model
has no hook. Both methods are restored at the end.
"""

from __future__ import annotations

import functools
import logging
import weakref
from dataclasses import asdict

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.training_args import ParallelMode

from liger_kernel.metrics.checks import (
    check,
    dtype_of,
    flops_or_none,
    peak_or_none,
    shifts_labels,
)
from liger_kernel.metrics.meter import Meter, Totals
from liger_kernel.metrics.prometheus import Endpoint, values_of

logger = logging.getLogger("liger_kernel")
# id of a Trainer's arguments -> the Trainer that a `LigerMetrics` was made with
_trainers = weakref.WeakValueDictionary()
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LigerMetrics(TrainerCallback, ExportableState):
    """Logs tokens a second, model FLOPs utilisation and peak memory, by the Trainer.

    ``trainer.add_callback(LigerMetrics(trainer))``. The figures are of all processes together,
    since the last log; evaluation and saving are not counted. They are in
    ``trainer.state.log_history`` and go wherever ``report_to`` sends the loss:
    ``tokens_per_second`` (without padding), ``label_tokens_per_second`` (tokens with a label),
    ``tflops_per_device`` and ``mfu``, ``hfu`` if layers are checkpointed, ``peak_memory_gib``,
    ``total_tokens``, ``total_label_tokens``. The Trainer's last line gets those of the whole run,
    as ``train_tokens_per_second`` and so on. Unknown figures, such as ``mfu`` on an unknown device,
    are left out, and a warning says why.

    Args:
        trainer: the Trainer that the callback is added to. It may be set later, as the attribute
            ``trainer``, but before training begins.
        prometheus_port: port of an HTTP endpoint for Prometheus on rank 0; 0 for a free one, None
            for no endpoint. ``metrics.endpoint`` has its address.
        prometheus_host: the address it listens on; "" is every address.
        peak_flops: FLOP/s of one device, for devices and dtypes that have no known peak.
        flops_per_token: operations of forward and backward, in place of counting the model's.
        attention: "causal" counts the pairs of tokens that the mask lets through, "full" every pair
            of a sequence, as the formula of the PaLM paper does.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        trainer: Trainer | None = None,
        prometheus_port: int | None = None,
        prometheus_host: str = "127.0.0.1",
        peak_flops: float | None = None,
        flops_per_token: float | None = None,
        attention: str = "causal",
    ):
        check(prometheus_port, peak_flops, flops_per_token, attention)
        self.arguments = {
            "prometheus_port": prometheus_port,
            "prometheus_host": prometheus_host,
            "peak_flops": peak_flops,
            "flops_per_token": flops_per_token,
            "attention": attention,
        }
        self.totals = asdict(Totals())  # of the run, with what was trained before a checkpoint
        self.trainer = trainer
        self.endpoint: Endpoint | None = None
        self._meter: Meter | None = None
        self._wrapped = {}  # method -> (the Trainer's own attribute or None, our function)
        self._interval = Totals()  # since the last log
        self._session = Totals()  # since training began in this process

    @property
    def trainer(self) -> Trainer | None:
        """The Trainer that the callback is added to."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None):
        self._trainer = trainer
        if trainer is not None:
            _trainers[id(trainer.args)] = trainer

    # ---- the Trainer's events ----

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._detach()
        if self.trainer is None:
            # ``restore_callback_states_from_checkpoint`` makes a new callback in place of this one,
            # without a Trainer
            trainer = _trainers.get(id(args))
            self.trainer = trainer if trainer is not None and trainer.args is args else None
        trainer = self.trainer
        if trainer is None:
            raise RuntimeError(
                "LigerMetrics has no Trainer: trainer.add_callback(LigerMetrics(trainer))"
            )
        self.totals = asdict(Totals())
        if state.global_step:  # training goes on from a checkpoint
            saved = state.stateful_callbacks.get(type(self).__name__) or {}
            saved = saved[0] if isinstance(saved, list) else saved
            self.totals |= saved.get("attributes", {}).get("totals", {})
        self._interval = Totals()
        self._session = Totals()
        options = self.arguments
        is_rank_zero = state.is_world_process_zero
        flops = flops_or_none(model, options["flops_per_token"], warns=is_rank_zero)
        precision = trainer.accelerator.mixed_precision  # or fp8, whose peak is no 16-bit peak
        dtype = dtype_of(model) if precision == "no" else PRECISIONS.get(precision)
        peak = peak_or_none(options["peak_flops"], args.device, dtype, warns=is_rank_zero)
        is_distributed = args.parallel_mode == ParallelMode.DISTRIBUTED
        self._meter = Meter(
            args.device,
            flops,
            peak=peak,
            devices=max(1, args.n_gpu),
            attention=options["attention"],
            replicas=trainer.get_tp_size() if hasattr(trainer, "get_tp_size") else 1,
            ranks=is_distributed and torch.distributed.is_initialized(),
            shifted=getattr(trainer, "_loss_shifts_labels", False) or shifts_labels(model),
        )
        if options["prometheus_port"] is not None and is_rank_zero:
            self.endpoint = Endpoint(options["prometheus_port"], options["prometheus_host"])
            logger.info("LigerMetrics: %s", self.endpoint.url)
        self._attach(trainer)
        self._meter.resume()

    def on_step_end(self, args, state, control, **kwargs):
        # the time until the next step is training, unless an evaluation comes
        self._meter.tick()
        if control.should_log or control.should_evaluate or control.should_save:
            # All ranks come by here, before anything takes time that is no training.
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

    # ---- counts and logs ----

    def _count(self, model, inputs):
        if model.training and self._meter is not None:
            self._meter.count(inputs, tuple(self.trainer.label_names or ()) + ("labels",))

    def _gather(self):
        counts = self._meter.take()
        self._interval.add(counts)
        self._session.add(counts)
        total = Totals(**self.totals)
        total.add(counts)
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
                state = self.trainer.state
                progress = dict(step=state.global_step, epoch=state.epoch)
                self.endpoint.update(values_of(report, self.totals, logs | progress))
        elif "train_runtime" in logs:
            for name, value in self._session.report().items():
                logs.setdefault(name if name == "peak_memory_gib" else f"train_{name}", value)

    def _attach(self, trainer):
        """Wrap two methods of the trainer: one to count, one to add to its logs."""
        original_compute_loss = trainer.compute_loss
        original_log = trainer.log

        @functools.wraps(original_compute_loss)
        def compute_loss(model, inputs, *args, **kwargs):
            self._count(model, inputs)
            return original_compute_loss(model, inputs, *args, **kwargs)

        @functools.wraps(original_log)
        def log(logs, *args, **kwargs):
            self._add_to(logs)
            return original_log(logs, *args, **kwargs)

        for name, wrapper in (("compute_loss", compute_loss), ("log", log)):
            self._wrapped[name] = trainer.__dict__.get(name), wrapper
            setattr(trainer, name, wrapper)

    def _detach(self):
        """Restore the trainer's methods. If a training has failed, the next one does this."""
        for name, (own_attribute, wrapper) in self._wrapped.items():
            if self.trainer.__dict__.get(name) is not wrapper:
                continue  # it is wrapped by others now: ours calls the original, and counts nothing
            if own_attribute is None:
                delattr(self.trainer, name)
            else:
                setattr(self.trainer, name, own_attribute)
        self._wrapped = {}
        self._meter = None
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None

    def state(self) -> dict:
        """Return what a checkpoint stores."""
        return {"args": dict(self.arguments), "attributes": {"totals": dict(self.totals)}}
