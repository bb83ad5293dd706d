"""Count what is trained on: tokens, tokens with a label, pairs in attention, time, memory.

Counts that depend on data (padding, labels, packed sequences) stay on the device until they are
asked for; the host does not wait for them before. Ranks are summed at that moment, by two
collectives of a few integers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from liger_kernel.metrics.flops import Flops, Reach
from liger_kernel.metrics.peaks import peak_memory

# operations are summed in two parts: one int64 is too small for those of many GPUs
OPERATIONS_BASE = 10**12
OTHER_INPUTS = "pixel", "image", "video", "audio", "features"
ATTENTION = "causal", "full"


@dataclass
class Totals:
    """Counts of all ranks, since some moment.

    label_tokens: tokens with a label.
    capacity: operations that the devices could have done in that time at their peaks.
    memory: bytes, of the rank that has held most.
    labelled: every batch had labels.
    counted: the operations of every batch are known.
    rated: the peak of every device is known.
    """

    tokens: int = 0
    label_tokens: int = 0
    model_flops: float = 0.0
    hardware_flops: float = 0.0
    seconds: float = 0.0
    capacity: float = 0.0
    devices: int = 0
    memory: int = 0
    labelled: bool = True
    counted: bool = True
    rated: bool = True

    def add(self, other: Totals) -> None:
        for field in fields(self):
            a, b = getattr(self, field.name), getattr(other, field.name)
            if field.name in ("devices", "memory"):
                merged = max(a, b)
            elif isinstance(a, bool):
                merged = a and b
            else:
                merged = a + b
            setattr(self, field.name, merged)

    def report(self) -> dict[str, float]:
        """Return the figures to log. Unknown ones are left out."""
        if not self.seconds:
            return {}
        report = {"tokens_per_second": self.tokens / self.seconds}
        if self.labelled:
            report["label_tokens_per_second"] = self.label_tokens / self.seconds
        if self.counted and self.devices:
            report["tflops_per_device"] = self.model_flops / self.seconds / self.devices / 1e12
        if self.counted and self.rated and self.capacity:
            report["mfu"] = self.model_flops / self.capacity
            if self.hardware_flops > self.model_flops:
                report["hfu"] = self.hardware_flops / self.capacity
        if self.memory:
            report["peak_memory_gib"] = self.memory / 2**30
        return report


class Sequences(NamedTuple):
    """The tokens that a model reads in a batch. ``mask`` and ``positions`` may be None."""

    rows: int
    length: int
    mask: torch.Tensor | None
    positions: torch.Tensor | None


class Meter:
    """Counts of one process.

    Args:
        device: of the model.
        flops: operations of its training step (`flops_of`), None if unknown.
        peak: FLOP/s of a device, None if unknown.
        devices: the number of devices that this process trains on.
        attention: "causal" counts the pairs that the mask lets through; "full" all pairs of a
            sequence, as the PaLM paper and the profiler do.
        replicas: the number of ranks with the same batch, as in tensor parallelism.
        ranks: other ranks train with this one, in the default group.
        shifted: the model shifts the labels, so the first one of a row is no target.
    """

    def __init__(
        self,
        device,
        flops: Flops | None = None,
        peak: float | None = None,
        devices: int = 1,
        attention: str = "causal",
        replicas: int = 1,
        ranks: bool = False,
        shifted: bool = True,
    ):
        self.device = torch.device(device)
        self.flops = flops
        self.peak = peak
        self.devices = devices
        self.replicas = replicas
        self.ranks = ranks
        self.shifted = shifted
        reaches = () if flops is None else (*flops.pairs, *flops.pairs_again)
        # the reach whose pairs are counted for a reach of the model
        self.counted_reach = {
            reach: Reach("all") if attention == "full" else reach for reach in reaches
        }
        self.names = ("tokens", "head", "labels", *dict.fromkeys(self.counted_reach.values()))
        self.last_time = time.perf_counter()
        self._clear()

    def _clear(self):
        self.on_host = dict.fromkeys(self.names, 0)
        self.on_device = {}  # device -> counts in the order of the names
        self.labelled = True
        self.counted = True
        self.active_seconds = 0.0

    # ---- time ----

    def resume(self) -> None:
        """Leave out the time since the last call."""
        self.last_time = time.perf_counter()

    def tick(self) -> None:
        """Count the time since the last call as training."""
        now = time.perf_counter()
        self.active_seconds += now - self.last_time
        self.last_time = now

    # ---- tokens ----

    @torch.no_grad()
    def count(self, inputs: Mapping, label_names=("labels",)) -> None:
        """Count a micro-batch that is trained on."""
        batch = sequences(inputs)
        num_labels = self._count_labels(inputs, label_names, batch)
        self.labelled &= num_labels is not None
        self.counted &= batch is not None and not has_other_inputs(inputs)
        counts = {}
        if num_labels is not None:
            counts["labels"] = num_labels
        if batch is not None:
            counts |= self._count_tokens(batch, inputs.get("logits_to_keep"))
        by_device = {}
        for name, value in counts.items():
            if isinstance(value, torch.Tensor):
                by_device.setdefault(value.device, {})[name] = value
            else:
                self.on_host[name] += value
        for device, device_counts in by_device.items():
            zero = torch.zeros((), dtype=torch.int64, device=device)
            row = [device_counts.get(name, zero).to(torch.int64) for name in self.names]
            row = torch.stack(row)
            if device in self.on_device:
                row = self.on_device[device] + row
            self.on_device[device] = row

    def _count_tokens(self, batch: Sequences, logits_to_keep) -> dict:
        rows, length, mask, positions = batch
        if mask is not None:
            mask = mask != 0
            positions = mask.cumsum(-1) - 1
            tokens = mask.sum()
        else:
            tokens = rows * length
        counts = {"tokens": tokens, "head": tokens}
        if isinstance(logits_to_keep, torch.Tensor):
            counts["head"] = rows * logits_to_keep.numel()
        elif logits_to_keep:
            counts["head"] = rows * min(int(logits_to_keep), length)
        for reach in dict.fromkeys(self.counted_reach.values()):
            if positions is None:
                counts[reach] = rows * pairs_of(length, reach)
                continue
            pairs = seen_from(positions, reach)
            if mask is not None:
                pairs = pairs * mask
            counts[reach] = pairs.sum()
        return counts

    def _count_labels(self, inputs, names, batch):
        """Return the number of tokens with a label, or None without labels."""
        is_shifted = inputs.get("shift_labels") is not None
        labels = None
        for name in ("shift_labels", *names, "completion_mask"):
            labels = inputs.get(name)
            if labels is not None:
                break
        if not isinstance(labels, torch.Tensor):
            return None
        if labels.dtype.is_floating_point or labels.dtype.is_complex:
            return None
        if labels is inputs.get("completion_mask"):
            return (labels != 0).sum()
        is_whole = batch is not None and labels.shape == (batch.rows, batch.length)
        if self.shifted and not is_shifted and is_whole:
            labels = labels[:, 1:]
        return (labels != -100).sum()

    # ---- the sums ----

    def take(self) -> Totals:
        """Return the counts of all ranks since the last call, and begin anew.

        All ranks have to call it. The host waits for the device.
        """
        if self.device.type in ("cuda", "xpu"):
            # the time is that of finished work
            getattr(torch, self.device.type).synchronize(self.device)
        self.tick()
        counts = dict(self.on_host)
        for row in self.on_device.values():
            for name, value in zip(self.names, row.tolist(), strict=True):
                counts[name] += value
        is_counted = self.counted and self.flops is not None
        model_flops = hardware_flops = 0.0
        if is_counted:
            pairs = {reach: counts[counted] for reach, counted in self.counted_reach.items()}
            model_flops = self.flops.model(counts["tokens"], counts["head"], pairs)
            hardware_flops = self.flops.hardware(counts["tokens"], counts["head"], pairs)
        operations = []
        for number in (model_flops, hardware_flops, (self.peak or 0) * self.devices):
            operations += divmod(round(number), OPERATIONS_BASE)
        flags = not self.labelled, not is_counted, self.peak is None
        sums = [*operations, counts["tokens"], counts["labels"], self.devices, *flags]
        maxima = [round(self.active_seconds * 1e9), peak_memory(self.device)]
        if self.ranks:
            sums, maxima = reduce_over_ranks(sums, maxima, self.device)
        *operations, tokens, labels, devices, unlabelled, uncounted, unrated = sums
        model_flops, hardware_flops, peak = (
            float(high * OPERATIONS_BASE + low)
            for high, low in zip(operations[::2], operations[1::2], strict=True)
        )
        nanoseconds, memory = maxima
        seconds = nanoseconds / 1e9
        self._clear()
        return Totals(
            tokens=tokens // self.replicas,
            label_tokens=labels // self.replicas,
            model_flops=model_flops / self.replicas,
            hardware_flops=hardware_flops / self.replicas,
            seconds=seconds,
            capacity=peak * seconds,
            devices=devices,
            memory=memory,
            labelled=not unlabelled,
            counted=not uncounted,
            rated=not unrated,
        )


def reduce_over_ranks(
    sums: list[int], maxima: list[int], device: torch.device
) -> tuple[list[int], list[int]]:
    """Return the sums, and the maxima, of these integers over all ranks."""
    dist = torch.distributed
    if dist.get_backend() == "gloo":
        device = torch.device("cpu")
    results = []
    for values, op in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
        tensor = torch.tensor([int(n) for n in values], dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op)
        results.append(tensor.tolist())
    return results[0], results[1]


def sequences(inputs: Mapping) -> Sequences | None:
    """Return the tokens of a batch for a language model or a policy loss, None for other batches.

    A policy loss has a prompt and its completion.
    """
    mask = inputs.get("attention_mask")
    ids = inputs.get("input_ids")
    if ids is None:
        ids = inputs.get("inputs_embeds")
    if ids is None and "prompt_ids" in inputs and "completion_ids" in inputs:
        return _prompts_and_completions(inputs)
    if not isinstance(ids, torch.Tensor) or ids.dim() == 0:
        return None
    rows, length = (1, len(ids)) if ids.dim() == 1 else ids.shape[:2]
    if not isinstance(mask, torch.Tensor) or mask.shape != (rows, length):
        mask = None
    positions = inputs.get("position_ids") if mask is None else None
    if not isinstance(positions, torch.Tensor) or positions.shape != (rows, length):
        positions = None
    return Sequences(rows, length, mask, positions)


def _prompts_and_completions(inputs: Mapping) -> Sequences | None:
    parts = [inputs["prompt_ids"], inputs["completion_ids"]]
    masks = [inputs.get("prompt_mask"), inputs.get("completion_mask")]
    if not all(isinstance(part, torch.Tensor) and part.dim() == 2 for part in parts):
        return None
    mask = None
    if all(isinstance(mask, torch.Tensor) and mask.dim() == 2 for mask in masks):
        mask = torch.cat(masks, 1)
    return Sequences(len(parts[0]), sum(part.shape[1] for part in parts), mask, None)


def has_other_inputs(inputs: Mapping) -> bool:
    """Return True if there is more than text: images, sounds. Their operations are not counted."""
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and any(word in name for word in OTHER_INPUTS):
            return True
    return False


def seen_from(positions: torch.Tensor, reach: Reach) -> torch.Tensor:
    """Return the number of keys that a query at each position sees.

    The sum over a sequence of n for "all" is n².
    """
    if reach.kind == "all":
        return 2 * positions + 1
    if reach.kind == "sliding":
        return (positions + 1).clamp(max=reach.size)
    if reach.kind == "chunked":
        return positions % reach.size + 1
    return positions + 1


def pairs_of(length: int, reach: Reach) -> int:
    """Return the sum of `seen_from` over a sequence."""
    if reach.kind == "all":
        return length * length
    if reach.kind == "sliding":
        start = min(length, reach.size)
        return start * (start + 1) // 2 + (length - start) * reach.size
    if reach.kind == "chunked":
        chunks, rest = divmod(length, reach.size)
        return chunks * (reach.size * (reach.size + 1) // 2) + rest * (rest + 1) // 2
    return length * (length + 1) // 2
