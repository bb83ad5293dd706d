"""Counts what is trained on: tokens, tokens that a loss is computed of, pairs that attention looks
at, time, memory.

Counts that depend on data (padding, labels, packed sequences) stay on the device until they are
asked for; the host does not wait for them before. Ranks are summed at that moment, by two
collectives of a few integers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from liger_kernel.metrics.flops import Flops, Reach
from liger_kernel.metrics.peaks import peak_memory

BASE = 10**12  # operations are summed in two parts: one int64 is too small for those of many GPUs
OF_OTHER_KINDS = "pixel", "image", "video", "audio", "features"
ATTENTION = "causal", "full"


@dataclass
class Totals:
    """Of all ranks, since some moment."""

    tokens: int = 0
    label_tokens: int = 0
    model_flops: float = 0.0
    hardware_flops: float = 0.0
    seconds: float = 0.0
    capacity: float = 0.0  # operations that the devices could have done in that time at their peaks
    devices: int = 0
    memory: int = 0  # bytes, of the rank that has held most
    labelled: bool = True  # whether every batch had labels
    counted: bool = True  # whether the operations of every batch are known
    rated: bool = True  # whether the peak of every device is known

    def add(self, other: Totals) -> None:
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name in ("devices", "memory"):
                merged = max(mine, theirs)
            else:
                merged = mine and theirs if isinstance(mine, bool) else mine + theirs
            setattr(self, field.name, merged)

    def report(self) -> dict[str, float]:
        """What is logged of it; what is not known is left out."""
        if not self.seconds:
            return {}
        found = {"tokens_per_second": self.tokens / self.seconds}
        if self.labelled:
            found["label_tokens_per_second"] = self.label_tokens / self.seconds
        if self.counted and self.devices:
            found["tflops_per_device"] = self.model_flops / self.seconds / self.devices / 1e12
        if self.counted and self.rated and self.capacity:
            found["mfu"] = self.model_flops / self.capacity
            if self.hardware_flops > self.model_flops:
                found["hfu"] = self.hardware_flops / self.capacity
        if self.memory:
            found["peak_memory_gib"] = self.memory / 2**30
        return found


class Sequences(NamedTuple):
    """What a model reads in a batch. ``mask`` and ``positions`` are on the device, or None."""

    rows: int
    length: int
    mask: torch.Tensor | None
    positions: torch.Tensor | None


class Meter:
    """Of one process.

    Args:
        device: of the model.
        flops: of its training step (`flops_of`), None if not known.
        peak: FLOP/s of a device, None if not known.
        devices: how many this process trains on.
        attention: "causal" counts the pairs that the mask lets through; "full" all pairs of a
        sequence, as the PaLM
            paper and the profiler do.
        replicas: ranks that are given the same batch, as in tensor parallelism.
        ranks: whether other ranks train with this one, by the default group.
        shifted: whether the model shifts the labels, so that the first one of a row is no target.
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
        self.device, self.flops, self.peak, self.devices = (
            torch.device(device),
            flops,
            peak,
            devices,
        )
        self.replicas, self.ranks, self.shifted = replicas, ranks, shifted
        reaches = () if flops is None else (*flops.pairs, *flops.pairs_again)
        self.reach = {reach: Reach("all") if attention == "full" else reach for reach in reaches}
        self.names = ("tokens", "head", "labels", *dict.fromkeys(self.reach.values()))
        self.since = time.perf_counter()
        self._clear()

    def _clear(self):
        self.on_host, self.on_device = dict.fromkeys(self.names, 0), {}
        self.labelled = self.counted = True
        self.active = 0.0

    # ---- time ----

    def resume(self) -> None:
        """The time since the last call counts for nothing."""
        self.since = time.perf_counter()

    def tick(self) -> None:
        """The time since the last call was training."""
        now = time.perf_counter()
        self.active += now - self.since
        self.since = now

    # ---- tokens ----

    @torch.no_grad()
    def count(self, inputs: Mapping, label_names=("labels",)) -> None:
        """A micro-batch that is trained on."""
        read = sequences(inputs)
        labels = self._labels(inputs, label_names, read)
        self.labelled &= labels is not None
        self.counted &= read is not None and not of_other_kinds(inputs)
        if read is None and labels is None:
            return
        found = {} if labels is None else {"labels": labels}
        if read is not None:
            found |= self._read(read, inputs.get("logits_to_keep"))
        values = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        for name in found.keys() - values.keys():
            self.on_host[name] += found[name]
        by_device = {}
        for name, value in values.items():
            by_device.setdefault(value.device, {})[name] = value
        for device, some in by_device.items():
            zero = torch.zeros((), dtype=torch.int64, device=device)
            row = torch.stack([some.get(name, zero).to(torch.int64) for name in self.names])
            self.on_device[device] = (
                self.on_device[device] + row if device in self.on_device else row
            )

    def _read(self, read: Sequences, kept) -> dict:
        rows, length, mask, positions = read
        if mask is not None:
            mask = mask != 0
            positions, tokens = mask.cumsum(-1) - 1, mask.sum()
        else:
            tokens = rows * length
        found = {"tokens": tokens, "head": tokens}
        if isinstance(kept, torch.Tensor):
            found["head"] = rows * kept.numel()
        elif kept:
            found["head"] = rows * min(int(kept), length)
        for reach in dict.fromkeys(self.reach.values()):
            if positions is None:
                found[reach] = rows * pairs_of(length, reach)
            else:
                seen = seen_from(positions, reach)
                found[reach] = (seen if mask is None else seen * mask).sum()
        return found

    def _labels(self, inputs, names, read):
        shifted = inputs.get("shift_labels")
        labels = shifted
        for name in (*names, "completion_mask"):
            labels = inputs.get(name) if labels is None else labels
        if (
            not isinstance(labels, torch.Tensor)
            or labels.dtype.is_floating_point
            or labels.dtype.is_complex
        ):
            return None
        if labels is inputs.get("completion_mask"):
            return (labels != 0).sum()
        if (
            shifted is None
            and self.shifted
            and read is not None
            and labels.shape == (read.rows, read.length)
        ):
            labels = labels[:, 1:]
        return (labels != -100).sum()

    # ---- all of it ----

    def take(self) -> Totals:
        """What was counted since the last call, of all ranks. Each has to call it. The host waits
        for the device."""
        if self.device.type in ("cuda", "xpu"):
            getattr(torch, self.device.type).synchronize(
                self.device
            )  # the time is that of work that is done
        self.tick()
        counts = dict(self.on_host)
        for row in self.on_device.values():
            for name, value in zip(self.names, row.tolist(), strict=True):
                counts[name] += value
        counted, model, hardware = self.counted and self.flops is not None, 0.0, 0.0
        if counted:
            pairs = {reach: counts[kind] for reach, kind in self.reach.items()}
            model = self.flops.model(counts["tokens"], counts["head"], pairs)
            hardware = self.flops.hardware(counts["tokens"], counts["head"], pairs)
        large = [
            part
            for ops in (model, hardware, (self.peak or 0) * self.devices)
            for part in divmod(round(ops), BASE)
        ]
        flags = not self.labelled, not counted, self.peak is None
        summed = [*large, counts["tokens"], counts["labels"], self.devices, *flags]
        largest = [round(self.active * 1e9), peak_memory(self.device)]
        if self.ranks:
            summed, largest = over_ranks(summed, largest, self.device)
        nanoseconds, memory = largest
        model, hardware, peak = (
            float(high * BASE + low) for high, low in zip(summed[:6:2], summed[1:6:2], strict=True)
        )
        tokens, labels, devices, unlabelled, uncounted, unrated = summed[6:]
        self._clear()
        seconds, replicas = nanoseconds / 1e9, self.replicas
        return Totals(
            tokens // replicas,
            labels // replicas,
            model / replicas,
            hardware / replicas,
            seconds,
            peak * seconds,
            devices,
            memory,
            not unlabelled,
            not uncounted,
            not unrated,
        )


def over_ranks(
    summed: list[int], largest: list[int], device: torch.device
) -> tuple[list[int], list[int]]:
    dist = torch.distributed
    if dist.get_backend() == "gloo":
        device = torch.device("cpu")
    results = []
    for values, op in ((summed, dist.ReduceOp.SUM), (largest, dist.ReduceOp.MAX)):
        tensor = torch.tensor([int(n) for n in values], dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op)
        results.append(tensor.tolist())
    return results[0], results[1]


def sequences(inputs: Mapping) -> Sequences | None:
    """The tokens of a batch as models of text are given them, or as policy losses are: a prompt and
    its completion."""
    masks = inputs.get("attention_mask")
    ids = inputs.get("input_ids")
    ids = inputs.get("inputs_embeds") if ids is None else ids
    if ids is None and "prompt_ids" in inputs and "completion_ids" in inputs:
        parts = [inputs["prompt_ids"], inputs["completion_ids"]]
        masks = [inputs.get("prompt_mask"), inputs.get("completion_mask")]
        if not all(isinstance(part, torch.Tensor) and part.dim() == 2 for part in parts):
            return None
        rows, length = len(parts[0]), sum(part.shape[1] for part in parts)
        whole = all(isinstance(mask, torch.Tensor) and mask.dim() == 2 for mask in masks)
        return Sequences(rows, length, torch.cat(masks, 1) if whole else None, None)
    if not isinstance(ids, torch.Tensor) or ids.dim() == 0:
        return None
    rows, length = (1, len(ids)) if ids.dim() == 1 else ids.shape[:2]
    mask = masks if isinstance(masks, torch.Tensor) and masks.shape == (rows, length) else None
    positions = inputs.get("position_ids") if mask is None else None
    if not isinstance(positions, torch.Tensor) or positions.shape != (rows, length):
        positions = None
    return Sequences(rows, length, mask, positions)


def of_other_kinds(inputs: Mapping) -> bool:
    """Whether there is more than text: images, sounds. What is computed of them is not counted."""
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and any(kind in name for kind in OF_OTHER_KINDS):
            return True
    return False


def seen_from(positions: torch.Tensor, reach: Reach) -> torch.Tensor:
    """How many keys a query at each position sees. The sum over a sequence of n for "all" is n²."""
    if reach.kind == "all":
        return 2 * positions + 1
    if reach.kind == "sliding":
        return (positions + 1).clamp(max=reach.size)
    return positions % reach.size + 1 if reach.kind == "chunked" else positions + 1


def pairs_of(length: int, reach: Reach) -> int:
    """The sum of `seen_from` over a sequence."""
    if reach.kind == "all":
        return length * length
    if reach.kind == "sliding":
        start = min(length, reach.size)
        return start * (start + 1) // 2 + (length - start) * reach.size
    if reach.kind == "chunked":
        chunks, rest = divmod(length, reach.size)
        return chunks * (reach.size * (reach.size + 1) // 2) + rest * (rest + 1) // 2
    return length * (length + 1) // 2
