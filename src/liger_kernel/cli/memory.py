"""The memory of a training step, counted by running the step without data.

The real model runs forward and backward on the meta device, at its true sizes: Hugging Face's code,
the patch's and autograd's. Tensors there have shapes and lifetimes, but no data. A `Ledger` sees
each allocation and when it is freed, and remembers the fullest moment. There is no formula for any
family here.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel.cli import meta

BLOCK_BYTES = 512  # the CUDA allocator's unit
# cuBLAS's workspace is 32 MiB a handle from Hopper on, 8 MiB before; the threads of forward and
# backward have one each.
WORKSPACE = 2 * 2**25
# torch 2.11 has no such functions for meta tensors
FP32_OUTPUT_MATMULS = torch.ops.aten.mm.dtype_out, torch.ops.aten.addmm.dtype_out
PARTS = "weights", "optimizer", "gradients", "activations", "head", "communication", "workspace"


class Unplannable(Exception):
    """The model cannot run without data; the message says why."""


def round_to_blocks(nbytes: float) -> int:
    return -(-int(nbytes) // BLOCK_BYTES) * BLOCK_BYTES


@dataclass
class Allocation:
    """Memory in use, and the part that it belongs to."""

    part_name: str
    nbytes: int


class Ledger(TorchDispatchMode):
    """The memory that is in use while this mode is entered, by `PARTS`.

    Parameters belong to *units*, which a sharding strategy gathers together: unit 0 has those that
    are in no layer, then come the layers. Allocations from the last layer's end in forward to its
    beginning in backward are the head's.

    Args:
        units: the parameters of each unit.
        copied_weights: bytes of a copy that exists while such a weight is read.
        on_unit: ``on_unit(unit)`` is called when a parameter of another unit than before is read.

    Attributes:
        now, total: the bytes in use, by part and in all.
        peak, peak_total: those of the fullest moment.
    """

    def __init__(
        self,
        units: list[list[torch.nn.Parameter]],
        copied_weights: dict | None = None,
        on_unit=None,
    ):
        super().__init__()
        self.now = dict.fromkeys(PARTS, 0)
        self.total = 0
        self.peak = dict.fromkeys(PARTS, 0)
        self.peak_total = 0
        self.current_part = "activations"  # of what is allocated now
        self.allocations: dict[int, Allocation] = {}
        self.unit = None
        self.layers_begun = False
        self.on_unit = on_unit
        self.unit_of = {storage_key(p): u for u, unit in enumerate(units) for p in unit}
        self.copied_weights = {storage_key(p): n for p, n in (copied_weights or {}).items()}
        self._output_layouts = {}

    def add(self, part_name: str, nbytes: int) -> None:
        self.now[part_name] += nbytes
        self.total += nbytes
        if self.total > self.peak_total:
            self.peak_total = self.total
            self.peak = dict(self.now)

    def assign_to_part(self, part_name: str, tensor: torch.Tensor) -> None:
        """Count the tensor's memory, which is allocated already, as this part's."""
        allocation = self.allocations.get(storage_key(tensor))
        if allocation is not None:
            self.now[allocation.part_name] -= allocation.nbytes
            self.now[part_name] += allocation.nbytes
            allocation.part_name = part_name

    def count_tensor(self, tensor: torch.Tensor) -> None:
        """Count the tensor's memory until it is freed, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.unit_of or key in self.allocations:
            return
        allocation = Allocation(self.current_part, round_to_blocks(storage.nbytes()))
        self.allocations[key] = allocation
        self.add(allocation.part_name, allocation.nbytes)
        weakref.finalize(storage, self._on_free, key)

    def _on_free(self, key):
        allocation = self.allocations.pop(key)
        self.add(allocation.part_name, -allocation.nbytes)

    def on_read(self, *values) -> int:
        """Note that an operation or a kernel reads these.

        Returns the bytes of the copies that it takes of weights.
        """
        return max(map(self._on_read_of_tensor, iterate_tensors(values)), default=0)

    def _on_read_of_tensor(self, tensor) -> int:
        key = storage_key(tensor)
        unit = self.unit_of.get(key)
        if unit is None:
            return 0
        if unit != self.unit:
            self.layers_begun |= unit > 0
            self.current_part = "head" if unit == 0 and self.layers_begun else "activations"
            self.unit = unit
            if self.on_unit is not None:
                self.on_unit(unit)
        return self.copied_weights.get(key, 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype != torch.bool:
                raise Unplannable("it reads a number from a tensor while it runs")
            return True  # asked of masks and positions: nothing is padded, no sequences are packed
        copies = self.on_read(args, kwargs)
        if copies:
            self.add("weights", copies)
        output = self._run(function, args, kwargs or {})
        for tensor in iterate_tensors(output):
            self.count_tensor(tensor)
        if copies:
            self.add("weights", -copies)
        return output

    def _run(self, function, args, kwargs):
        """Return ``function(*args, **kwargs)``.

        The next layer calls the same with the same shapes. It gets an empty tensor of the layout
        that the first call returned, which takes a tenth of the time.
        """
        if function in FP32_OUTPUT_MATMULS:
            return kwargs["out"]
        key = function, _layout_key(args), _layout_key(kwargs)
        layout = self._output_layouts.get(key)
        if layout is not None:
            shape, strides, dtype = layout
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        output = function(*args, **kwargs)
        if _returns_new_memory(function) and isinstance(output, torch.Tensor) and output.is_meta:
            self._output_layouts[key] = output.shape, output.stride(), output.dtype
        return output


def _layout_key(value):
    """Return a key of all that the layout of an operation's output depends on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(_layout_key, value))
    if isinstance(value, dict):
        return tuple((name, _layout_key(inner)) for name, inner in value.items())
    return type(value), value


@functools.cache
def _returns_new_memory(function) -> bool:
    """Return True if the function has one output, which is no view of an argument."""
    schema = function._schema
    return (
        not schema.is_mutable and len(schema.returns) == 1 and schema.returns[0].alias_info is None
    )


def storage_key(tensor) -> int:
    return tensor.untyped_storage()._cdata


def iterate_tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from iterate_tensors(inner)
    elif isinstance(value, dict):
        yield from iterate_tensors(tuple(value.values()))


# ---- a step ----


@dataclass
class Sharding:
    """The share of weights and gradients that one GPU of ``ranks`` holds.

    gathers: weights are sharded, and gathered a unit at a time.
    sums: gradients are sharded, and summed "by unit" or "in buckets"; "": they are not sharded.
    compute_bytes: bytes of an element of a gathered weight.
    reduced_bytes: bytes of an element of a gradient while it is summed.
    kept_bytes: bytes of an element of a gradient's share. None: as the gradient is.
    live_bytes: bytes of weights that stay gathered, whatever their unit. None: this unit and the
        next.
    """

    ranks: int = 1
    gathers: bool = False
    sums: str = ""
    compute_bytes: int = 2
    reduced_bytes: int = 2
    kept_bytes: int | None = None
    live_bytes: int | None = None

    def share_of_gradient(self, p) -> int:
        ranks = self.ranks if self.sums else 1
        return round_to_blocks(p.numel() * (self.kept_bytes or p.element_size()) / ranks)


@dataclass
class Step:
    """A training step of a model.

    persistent_bytes: bytes that are held from the step's beginning to its end, by part.
    element_bytes: bytes of an element of each quantised weight.
    update_bytes: bytes that the optimizer's step takes beyond its states.
    accumulates: the gradients of an earlier micro-batch are there.
    offload: two of the layers' checkpoints are on the GPU, the others wait on the host.
    kept_layers: the number of last layers that are not recomputed.
    """

    model: torch.nn.Module
    units: list[list[torch.nn.Parameter]]
    persistent_bytes: dict[str, int]
    sharding: Sharding = field(default_factory=Sharding)
    element_bytes: dict = field(default_factory=dict)
    update_bytes: int = 0
    accumulates: bool = False
    autocast: bool = False
    offload: bool = False
    kept_layers: int = 0

    def peak(self, batch: int, sequence: int) -> dict[str, int]:
        """Return the bytes of the fullest moment of a step, by part: `PARTS`."""
        return StepRun(self).peak(batch, sequence)


class StepRun:
    """One run of a step."""

    def __init__(self, step: Step):
        self.step = step
        self.sharding = step.sharding
        self.in_backward = False
        copied_weights = {p: 2 * p.numel() for p in step.element_bytes}  # in bf16, for its matmul
        on_unit = self._gather if step.sharding.gathers else None
        self.ledger = Ledger(step.units, copied_weights, on_unit)
        self.trained_parameters = [p for unit in step.units for p in unit if p.requires_grad]
        # sharding: bytes that are gathered now, of each gathered unit, and of gradients in a sum
        self.gathered_bytes = 0
        self.unit_bytes = [sum(map(self._gathered_size, unit)) for unit in step.units]
        self.sum_bytes = 0
        self.missing_grads = [{id(p) for p in unit if p.requires_grad} for unit in step.units]
        # offloading: the storages of the checkpoints, and the bytes of those on the host
        self.checkpoints = []
        self.on_host = {}

    def _gathered_size(self, p):
        return round_to_blocks(
            p.numel() * self.step.element_bytes.get(p, self.sharding.compute_bytes)
        )

    def peak(self, batch, sequence) -> dict[str, int]:
        ledger, step = self.ledger, self.step
        for part_name, nbytes in step.persistent_bytes.items():
            ledger.add(part_name, nbytes)
        ledger.add("workspace", WORKSPACE)
        if step.accumulates:
            ledger.add(
                "gradients", sum(map(self.sharding.share_of_gradient, self.trained_parameters))
            )
        hooks = []
        for p in self.trained_parameters:
            p.grad = None
            hooks.append(p.register_post_accumulate_grad_hook(self._on_gradient))
        ids = torch.empty(batch, sequence, dtype=torch.long, device="meta")
        try:
            with meta.as_on_a_gpu(ledger.on_read), self._counted_checkpoints(), ledger:
                with meta.autocast(step.autocast):
                    loss = step.model(input_ids=ids, labels=ids, use_cache=False).loss
                self.in_backward = True
                meta.backward(loss)
                ledger.add("optimizer", step.update_bytes)
                self.end = dict(ledger.now)
        except Unplannable:
            raise
        except Exception as problem:  # a family's code may raise anything where there is no data
            raise Unplannable(str(problem).partition("\n")[0]) from problem
        finally:
            for hook in hooks:
                hook.remove()
            for p in self.trained_parameters:
                p.grad = None
        return ledger.peak

    # ---- gradients that AccumulateGrad has just stored ----

    def _on_gradient(self, p):
        sharding, ledger = self.sharding, self.ledger
        if p.grad is None:  # no gradient reached it
            return
        if self.step.accumulates and not sharding.sums:
            p.grad = None  # it is added to the one that was there
            return
        ledger.assign_to_part("communication" if sharding.sums else "gradients", p.grad)
        if sharding.sums == "in buckets":  # the buckets are in Step.persistent_bytes
            self._keep_shares([p])
        elif sharding.sums == "by unit":
            unit = ledger.unit_of[storage_key(p)]
            self.missing_grads[unit].discard(id(p))
            if not self.missing_grads[unit]:
                parameters = [q for q in self.step.units[unit] if q.requires_grad]
                ledger.add("communication", -self.sum_bytes)  # of the unit before
                self.sum_bytes = sum(
                    round_to_blocks(q.numel() * sharding.reduced_bytes) for q in parameters
                )
                ledger.add("communication", self.sum_bytes)
                self._keep_shares(parameters)

    def _keep_shares(self, parameters):
        """Replace whole gradients by this GPU's shares of them."""
        nbytes = sum(map(self.sharding.share_of_gradient, parameters))
        self.ledger.add("gradients", nbytes)
        if self.step.accumulates:  # it is added to the one that was there
            self.ledger.add("gradients", -nbytes)
        for p in parameters:
            p.grad = None

    # ---- weights ----

    def _gather(self, unit):
        """Count the weights that are gathered while this unit is at work.

        FSDP2 gathers into one buffer and copies the weights out of it. In forward the buffer stays
        until the next gather, in backward the next one is on its way: so it is twice the unit at
        work, and unit 0, which stays.
        """
        if self.sharding.live_bytes is not None:
            nbytes = min(sum(self.unit_bytes), self.sharding.live_bytes)
        else:
            if unit == 0:
                buffer = len(self.unit_bytes) - 1 if self.ledger.layers_begun else 0
            else:
                buffer = max(unit - 1, 1) if self.in_backward else unit
            nbytes = self.unit_bytes[0] + self.unit_bytes[buffer]
            if unit:
                nbytes += self.unit_bytes[unit]
        self.ledger.add("communication", nbytes - self.gathered_bytes)
        self.gathered_bytes = nbytes

    # ---- checkpoints on the host ----

    @contextlib.contextmanager
    def _counted_checkpoints(self):
        """Count the layers' checkpoints as they are offloaded to the host and copied back."""
        name = "_gradient_checkpointing_func"
        layers = []
        if self.step.offload:
            layers = [m for m in self.step.model.modules() if name in vars(m)]
        checkpoint_functions = [vars(layer)[name] for layer in layers]
        try:
            for layer, checkpoint in zip(layers, checkpoint_functions, strict=True):
                setattr(layer, name, self._counted(checkpoint))
            yield
        finally:
            for layer, checkpoint in zip(layers, checkpoint_functions, strict=True):
                setattr(layer, name, checkpoint)

    def _counted(self, checkpoint):
        def counted_checkpoint(function, x, *args, **kwargs):
            index = len(self.checkpoints)
            self.checkpoints.append(storage_key(x))
            self._to_host(index - 2)

            def function_on_gpu(*args, **kwargs):
                # The checkpoint comes back. The one before it comes with it only if half of the
                # memory is free.
                if self.in_backward:
                    self._from_host(index)
                return function(*args, **kwargs)

            return checkpoint(function_on_gpu, x, *args, **kwargs)

        return counted_checkpoint

    def _to_host(self, index):
        if index < 0:
            return
        allocation = self.ledger.allocations.get(self.checkpoints[index])
        if allocation is not None:
            self.ledger.add(allocation.part_name, -allocation.nbytes)
            self.on_host[index] = allocation.nbytes
            allocation.nbytes = 0

    def _from_host(self, index):
        if index in self.on_host:
            allocation = self.ledger.allocations[self.checkpoints[index]]
            allocation.nbytes = self.on_host.pop(index)
            self.ledger.add(allocation.part_name, allocation.nbytes)
