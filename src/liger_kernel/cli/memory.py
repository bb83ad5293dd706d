"""What a training step takes, found by running it without memory.

The real model runs forward and backward on the meta device, at its true sizes: Hugging Face's code,
the patch's and autograd's. Tensors there have shapes and lifetimes, but no data. A `Ledger` sees
each allocation and when it is let go of, and remembers the fullest moment. No formula of any family
stands here."""

from __future__ import annotations

import contextlib
import functools
import weakref
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel.cli import meta

BLOCK = 512  # bytes: the CUDA allocator's unit
# cuBLAS's workspace is 32 MiB a handle from Hopper on, 8 MiB before; the threads of forward and
# backward have one each.
WORKSPACE = 2 * 2**25
INTO_FP32 = (
    torch.ops.aten.mm.dtype_out,
    torch.ops.aten.addmm.dtype_out,
)  # torch 2.11 has no such of meta tensors
PARTS = "weights", "optimizer", "gradients", "activations", "head", "communication", "workspace"


class Unplannable(Exception):
    """The model cannot run without data; the message says what it asked for."""


def blocks(nbytes: float) -> int:
    return -(-int(nbytes) // BLOCK) * BLOCK


class Ledger(TorchDispatchMode):
    """The memory that is in use while it is entered: ``now`` and, at the fullest moment, ``peak``,
    by `PARTS`.

    Parameters belong to *units*, which a sharding strategy gathers together: unit 0 is what is in
    no layer, then come the layers. ``on_unit(unit)`` is called when a parameter of another unit
    than before is read. What is allocated from the last layer's end in forward to its beginning in
    backward is the head's."""

    def __init__(
        self, units: list[list[torch.nn.Parameter]], opened: dict | None = None, on_unit=None
    ):
        super().__init__()
        self.now, self.peak, self.most = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0), 0
        self.total, self.known, self.outcomes, self.part = 0, {}, {}, "activations"
        self.unit, self.begun, self.on_unit = None, False, on_unit
        self.unit_of = {_memory(p): u for u, unit in enumerate(units) for p in unit}
        self.opened = {
            _memory(p): n for p, n in (opened or {}).items()
        }  # bytes of a copy while such a weight is read

    def add(self, part: str, nbytes: int) -> None:
        self.now[part] += nbytes
        self.total += nbytes
        if self.total > self.most:
            self.most, self.peak = self.total, dict(self.now)

    def belongs_to(self, part: str, tensor: torch.Tensor) -> None:
        """Its memory, allocated already, is another part's."""
        entry = self.known.get(_memory(tensor))
        if entry is not None:
            self.now[entry[0]] -= entry[1]
            self.now[part] += entry[1]
            entry[0] = part

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.unit_of or key in self.known:
            return
        entry = self.known[key] = [self.part, blocks(storage.nbytes())]
        self.add(*entry)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key):
        part, nbytes = self.known.pop(key)
        self.add(part, -nbytes)

    def reads(self, *values) -> int:
        """An operation or a kernel is given these. -> bytes of the copies that it takes of
        weights."""
        return max(map(self._reads, _tensors(values)), default=0)

    def _reads(self, tensor) -> int:
        key = _memory(tensor)
        unit = self.unit_of.get(key)
        if unit is None:
            return 0
        if unit != self.unit:
            self.begun |= unit > 0
            self.part = "head" if unit == 0 and self.begun else "activations"
            self.unit = unit
            if self.on_unit is not None:
                self.on_unit(unit)
        return self.opened.get(key, 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype != torch.bool:
                raise Unplannable("it reads a number from a tensor while it runs")
            return True  # asked of masks and positions: nothing is padded, no sequences are packed
        opened = self.reads(args, kwargs)
        if opened:
            self.add("weights", opened)
        out = self._outcome(function, args, kwargs or {})
        for tensor in _tensors(out):
            self.see(tensor)
        if opened:
            self.add("weights", -opened)
        return out

    def _outcome(self, function, args, kwargs):
        """``function(*args, **kwargs)``. The next layer asks the same of the same shapes, and gets
        a tensor as the one before, which is made in a tenth of the time."""
        key = function, _likeness(args), _likeness(kwargs)
        before = self.outcomes.get(key)
        if function in INTO_FP32:
            return kwargs["out"]
        if before is not None:
            shape, strides, dtype = before
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        out = function(*args, **kwargs)
        if _is_new(function) and isinstance(out, torch.Tensor) and out.is_meta:
            self.outcomes[key] = out.shape, out.stride(), out.dtype
        return out


def _likeness(value):
    """What a tensor's shape depends on, as a key."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(_likeness, value))
    if isinstance(value, dict):
        return tuple((name, _likeness(inner)) for name, inner in value.items())
    return type(value), value


@functools.cache
def _is_new(function) -> bool:
    """Whether its one output is memory of its own."""
    schema = function._schema
    return (
        not schema.is_mutable and len(schema.returns) == 1 and schema.returns[0].alias_info is None
    )


def _memory(tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


# ---- a step ----


@dataclass
class Sharding:
    """How one GPU of ``ranks`` holds its share. Bytes of an element: ``compute`` of a gathered
    weight, ``reduced`` of a gradient while it is summed, ``kept`` of its share (None: as the
    gradient is)."""

    ranks: int = 1
    gathers: bool = False  # weights are sharded, and gathered a unit at a time
    sums: str = ""  # gradients are sharded, summed "by unit" or "in buckets"
    compute: int = 2
    reduced: int = 2
    kept: int | None = None
    live: int | None = (
        # bytes of weights that stay gathered, whatever their unit; None: this unit and the next
        None
    )

    def share_of_gradient(self, p) -> int:
        return blocks(
            p.numel() * (self.kept or p.element_size()) / (self.ranks if self.sums else 1)
        )


@dataclass
class Step:
    """A model, and what a step of it holds from its beginning to its end."""

    model: torch.nn.Module
    units: list[list[torch.nn.Parameter]]
    held: dict[str, int]  # bytes from the step's beginning to its end, by part
    sharding: Sharding = field(default_factory=Sharding)
    quantised: dict = field(default_factory=dict)  # weight -> bytes of an element
    updating: int = 0  # bytes that the optimizer's step takes beyond its states
    accumulates: bool = False  # the gradients of an earlier micro-batch are there
    autocast: bool = False
    offload: bool = (
        False  # of the layers' checkpoints two are on the GPU, the others wait on the host
    )

    def peak(self, batch: int, sequence: int) -> dict[str, int]:
        """The fullest moment of a step, by part: `PARTS`."""
        return _Run(self).peak(batch, sequence)


class _Run:
    """One run of a step."""

    def __init__(self, step: Step):
        self.step, self.sharding, self.backward = step, step.sharding, False
        opened = {p: 2 * p.numel() for p in step.quantised}  # in bf16, while it is multiplied
        self.ledger = Ledger(step.units, opened, self._gather if step.sharding.gathers else None)
        self.gathered = self.waiting = 0
        self.sizes = [
            sum(blocks(p.numel() * step.quantised.get(p, step.sharding.compute)) for p in unit)
            for unit in step.units
        ]
        self.left = [{id(p) for p in unit if p.requires_grad} for unit in step.units]
        self.trained = [p for unit in step.units for p in unit if p.requires_grad]
        self.inputs, self.away = [], {}

    def peak(self, batch, sequence) -> dict[str, int]:
        ledger, step = self.ledger, self.step
        for part, nbytes in step.held.items():
            ledger.add(part, nbytes)
        ledger.add("workspace", WORKSPACE)
        in_place = step.accumulates and not self.sharding.sums
        if step.accumulates:
            ledger.add("gradients", sum(map(self.sharding.share_of_gradient, self.trained)))
        hooks = []
        for p in self.trained:
            p.grad = torch.empty_like(p) if in_place else None
            hooks += [] if in_place else [p.register_post_accumulate_grad_hook(self._gradient)]
        ids = torch.empty(batch, sequence, dtype=torch.long, device="meta")
        try:
            with meta.as_on_a_gpu(ledger.reads), self._checkpoints(), ledger:
                with meta.autocast("meta", enabled=step.autocast):
                    loss = step.model(input_ids=ids, labels=ids, use_cache=False).loss
                self.backward = True
                meta.backward(loss)
                ledger.add("optimizer", step.updating)
                self.end = dict(ledger.now)
        except Unplannable:
            raise
        except (
            Exception
        ) as problem:  # a family's code may raise whatever it likes where there is no data
            raise Unplannable(str(problem).partition("\n")[0]) from problem
        finally:
            for hook in hooks:
                hook.remove()
            for p in self.trained:
                p.grad = None
        return ledger.peak

    # ---- gradients: what AccumulateGrad has just made ----

    def _gradient(self, p):
        s, ledger = self.sharding, self.ledger
        if p.grad is None:  # no gradient reached it
            return
        ledger.belongs_to("gradients" if not s.sums else "communication", p.grad)
        if s.sums == "in buckets":  # the buckets themselves are held
            self._sharded([p])
        elif s.sums == "by unit":
            unit = ledger.unit_of[_memory(p)]
            self.left[unit].discard(id(p))
            if not self.left[unit]:
                trained = [q for q in self.step.units[unit] if q.requires_grad]
                ledger.add("communication", -self.waiting)  # what the unit before was summed in
                self.waiting = sum(blocks(q.numel() * s.reduced) for q in trained)
                ledger.add("communication", self.waiting)
                self._sharded(trained)

    def _sharded(self, parameters):
        nbytes = sum(map(self.sharding.share_of_gradient, parameters))
        self.ledger.add("gradients", nbytes)
        if self.step.accumulates:  # it is added to the one that was there
            self.ledger.add("gradients", -nbytes)
        for p in parameters:
            p.grad = None

    # ---- weights ----

    def _gather(self, unit):
        """FSDP2 gathers into one buffer and copies the weights out of it. In forward the buffer
        stays until the next gather, in backward the next one is on its way: so it is twice the unit
        at work, and unit 0, which stays."""
        s, last = self.sharding, len(self.sizes) - 1
        if s.live is not None:
            wanted = min(sum(self.sizes), s.live)
        else:
            buffer = max(unit - 1, 1) if self.backward and unit else unit
            buffer = last if unit == 0 and self.ledger.begun else buffer
            wanted = sum(self.sizes[u] for u in (0, buffer, *([unit] if unit else [])))
        self.ledger.add("communication", wanted - self.gathered)
        self.gathered = wanted

    # ---- checkpoints on the host ----

    @contextlib.contextmanager
    def _checkpoints(self):
        name = "_gradient_checkpointing_func"
        layers = (
            [m for m in self.step.model.modules() if name in vars(m)] if self.step.offload else []
        )
        saved = [vars(layer)[name] for layer in layers]
        try:
            for layer, checkpoint in zip(layers, saved, strict=True):
                setattr(layer, name, self._counted(checkpoint))
            yield
        finally:
            for layer, checkpoint in zip(layers, saved, strict=True):
                setattr(layer, name, checkpoint)

    def _counted(self, checkpoint):
        def keep(function, x, *args, **kwargs):
            index = len(self.inputs)
            self.inputs.append(_memory(x))
            self._to_host(index - 2)

            def again(*given, **more):
                # it comes back; the one before it comes with it only if half of the memory is free
                if self.backward:
                    self._back(index)
                return function(*given, **more)

            return checkpoint(again, x, *args, **kwargs)

        return keep

    def _to_host(self, index):
        entry = self.ledger.known.get(self.inputs[index]) if index >= 0 else None
        if entry is not None:
            self.ledger.add(entry[0], -entry[1])
            self.away[index], entry[1] = entry[1], 0

    def _back(self, index):
        if index in self.away:
            entry = self.ledger.known[self.inputs[index]]
            entry[1] = self.away.pop(index)
            self.ledger.add(*entry)
