"""CUDA graphs of a layer's calls: forward and backward are recorded once and replayed, so that
neither costs the host more than a few launches.

    stack = LayerStack()                        # of layers that run one after another
    graphs = LayerGraphs(stack)                 # of one of them
    y = graphs.call(layer, run, x, kwargs)      # what run(x, **kwargs) gives

``run`` is the layer's own call, with its checkpoint if it has one. The first call of a kind runs as
it is. The second one records two graphs: forward, and the backward of the same tensors, by
autograd. From then on a call copies its inputs to where the graphs read, replays forward, and
returns a copy of the output; backward does the same with gradients. Addresses are recorded, values
are not: weights may be written to between steps, as optimizers do.

Kind of a call: what a graph fixes beside the layer itself (`_kind`). A replay would be wrong, and
the layer runs as it is, if

* the layer is no longer what was recorded (`LayerState`);
* something looks at the call or changes it: hooks, modes, torch.func, a compiler, a capture around
  it, another thread or stream;
* an argument is no plain tensor on the GPU, number, string or None;
* the first call drew random numbers, or wrote to its arguments or to the layer's tensors;
* what it trains is not among its parameters;
* what it would overwrite is still needed. The graphs of a stack share memory. A graph that was
  recorded later may keep its tensors for backward where an earlier one computes. So a graph runs
  only while none that was recorded later, nor itself, waits for its backward. `LayerStack` knows
  these; in backward, which could not run as it is, such a layer is computed once more. A layer that
  waits behind one that was recorded later is recorded again, as the last one.

What is not looked at: functions and classes, the random numbers of other libraries, and what
objects hold that are none of the modules', their weights', their configs', or a dict or list of
these. So this is only done if it is asked for.

After ``torch.cuda.make_graphed_callables``, which records all layers beforehand for one kind of
call, and keeps no count of what waits."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import random
import threading
import weakref
from typing import NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as torch_modules

from liger_kernel.core import devices
from liger_kernel.core.layer_state import PLAIN_VALUES, LayerState
from liger_kernel.core.overwrite import recorded_backward

logger = logging.getLogger(__name__)

MAX_KINDS = 4  # of calls that are recorded of a layer: each kind keeps tensors of its own
MAX_FIRST = 16  # kinds that were seen once and are remembered
MAX_STATES = 4  # of a layer: its adapters switched off and on are two
MAX_CHANGES = 64  # a layer that has changed so often is not looked at again
MAX_RECORDINGS = 3  # of one kind, for want of memory or since layers run in another order


class NotRecordable(Exception):
    """Raised in a rehearsal: a replay would leave out something that the layer does."""


class First(NamedTuple):
    """Shape and dtype of what the first call of a kind returned; the second call is recorded.

    ``recordings``: how often that was tried."""

    shape: torch.Size
    dtype: torch.dtype
    recordings: int = 0


# ---- kinds of calls ----


def _flatten(kwargs, device):
    """Return the tensors among the arguments, and the rest as something to compare; None if there
    is anything else."""
    tensors, rest = [], []
    for name, value in kwargs.items():
        for item in value if type(value) is tuple else (value,):
            if type(item) is torch.Tensor:
                if item.requires_grad or item.device != device or item.is_inference():
                    return None
                tensors.append(item)
                same = next(i for i, tensor in enumerate(tensors) if tensor is item)
                item = same, item.shape, item.stride(), item.dtype
            elif type(item) not in PLAIN_VALUES:
                return None
            rest.append((name, type(value), item))
    return tensors, tuple(rest)


def _kind(x, rest):
    return (
        (x.shape, x.stride(), x.dtype, x.requires_grad),
        rest,
        torch.is_grad_enabled(),
        devices.autocast_dtype(x),
        devices.product_settings(),
    )


def _is_seen():
    """Return True if something sees each operation, or a replay may not stand for this call."""
    return (
        torch.compiler.is_compiling()
        or devices.in_func_transform()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        or torch.is_anomaly_enabled()
        or torch.is_inference_mode_enabled()
        or torch_modules._has_any_global_hook()
        or threading.current_thread() is not threading.main_thread()
    )


# ---- a layer ----


class LayerGraphs:
    """The graphs of one layer. A copy, or what a pickle gives, has none yet."""

    def __init__(self, stack: LayerStack):
        self.stack = stack
        self.states = []  # (LayerState, its kinds: kind -> First, then _Graph)
        self.plain_state = None  # the last one in which it is not recorded
        self.changes = 0
        self.refusal = None  # why the layer is not recorded any more

    def __deepcopy__(self, memo):
        return LayerGraphs(copy.deepcopy(self.stack, memo))

    def __reduce__(self):
        return LayerGraphs, (self.stack,)

    def call(self, layer, run, x, kwargs, run_recordable=None):
        """Return ``run(x, **kwargs)``, by a graph where that is the same.

        ``run_recordable``: computes the same in a way that can be recorded, if ``run`` can't."""
        if type(x) is not torch.Tensor or x.is_inference() or self.refusal or _is_seen():
            return run(x, **kwargs)
        arguments = _flatten(kwargs, x.device)
        if arguments is None or not self.stack.recorder.takes(x):
            return run(x, **kwargs)
        tensors, rest = arguments
        state, kinds = self._state(layer, x)
        if state is None:
            return run(x, **kwargs)
        kind = _kind(x, rest)
        if kind not in kinds:
            return self._call_first(run, x, kwargs, state, kinds, rest)
        run_recordable = run_recordable or run
        if self._is_to_record(kinds, kind):
            self._record(run_recordable, x, kwargs, state, kinds, kind, tensors)
        graph = kinds.get(kind)
        if type(graph) is not _Graph or not graph.may_replay(tensors):
            return run(x, **kwargs)
        if not graph.has_backward:
            return graph.forward(x, tensors)
        return _Replay.apply(graph, run_recordable, tensors, x, *graph.trainable)

    def _state(self, layer, x) -> tuple[LayerState | None, dict | None]:
        """Return the layer's state and its kinds of calls, or None if it is not recorded as it
        is."""
        for state, kinds in self.states:
            if state.is_unchanged():
                return state, kinds
        if self.plain_state is not None and self.plain_state.is_unchanged():
            return None, None
        state = LayerState(layer)
        reason = state.refusal(x)
        if reason is not None:  # it may pass
            self.plain_state = state
            self.stack.warn(reason)
            return None, None
        self.changes += 1
        if self.changes > MAX_CHANGES:
            self._refuse("it changes again and again")
            return None, None
        # graphs of other weights would keep these
        self.states = [known for known in self.states if known[0].lies_as(state)]
        self.states = [*self.states, (state, {})][-MAX_STATES:]
        return self.states[-1]

    def _refuse(self, reason):
        self.refusal = reason
        self.states = []
        self.stack.warn(reason)

    def _is_to_record(self, kinds, kind) -> bool:
        """Return True if a call was seen once, or its graph waits behind one recorded later."""
        known = kinds[kind]
        first = _first_of(known)
        if first.recordings >= MAX_RECORDINGS:
            return False
        if known is first:
            return _count_recorded(kinds) < MAX_KINDS
        return self.stack.is_out_of_order(known)

    def _call_first(self, run, x, kwargs, state, kinds, rest):
        tensors = [t for t in (x, *_tensors(kwargs), *state.tensors) if not t.is_inference()]
        versions = [t._version for t in tensors]
        drawn = self._random_numbers(x)
        y = run(x, **kwargs)
        if type(y) is not torch.Tensor:
            self._refuse("it returns more than a tensor")
        elif self._random_numbers(x) != drawn:
            self._refuse("it draws random numbers")
        elif [t._version for t in tensors] != versions:
            self._refuse("it writes to its arguments, or to its own tensors")
        else:
            # as it is now: attention's first call in a process orders its implementations
            kinds[_kind(x, rest)] = First(y.shape, y.dtype)
            seen_once = [kind for kind, known in kinds.items() if type(known) is First]
            for kind in seen_once[:-MAX_FIRST]:
                del kinds[kind]
        return y

    def _random_numbers(self, x):
        of_torch = torch.get_rng_state().numpy().tobytes()  # of the host's generator
        return self.stack.recorder.random_numbers(x), of_torch, random.getstate()

    def _record(self, run, x, kwargs, state, kinds, kind, tensors):
        places = self.stack.places_of(kind, tensors)
        first = _first_of(kinds[kind])
        first = first._replace(recordings=first.recordings + 1)
        kinds[kind] = first  # a graph that was there gives its memory to the new one
        try:
            graph = _Graph(self.stack, state, x, kwargs, places, first)
            graph.record(run, x, tensors)
        except torch.OutOfMemoryError:
            return
        except Exception as error:
            self._refuse(f"it can't be recorded: {type(error).__name__}: {error}")
            return
        kinds[kind] = graph


def _first_of(known: First | _Graph) -> First:
    """Return what was noted at the first call of a kind, which its graph holds, too."""
    return known if type(known) is First else known.first


def _count_recorded(kinds):
    return sum(type(known) is _Graph for known in kinds.values())


def _tensors(kwargs):
    for value in kwargs.values():
        for item in value if type(value) is tuple else (value,):
            if type(item) is torch.Tensor:
                yield item


# ---- layers with memory in common ----


class LayerStack:
    """Layers that run one after another, with the memory that their graphs share."""

    def __init__(self):
        self.recorder = devices.GraphRecorder()
        self.recorded = itertools.count()
        self.waiting = []  # weak references to calls that wait for their backward, in order
        self.buffers = {}
        self.reasons = set()  # why layers of it are not recorded
        self.places = {}  # kind -> the tensor arguments of its calls, and where the graphs read

    def __deepcopy__(self, memo):
        return LayerStack()

    def __reduce__(self):
        return LayerStack, ()

    def warn(self, reason):
        """Say, once for all layers, why they are not recorded."""
        if reason not in self.reasons:
            self.reasons.add(reason)
            logger.warning("cuda_graphs: layers run without them: %s", reason)

    def places_of(self, kind, tensors) -> list[_Place]:
        """Return where the graphs of a kind read these arguments. Layers share a place if they get
        one and the same tensor."""
        known = self.places.setdefault(kind, [])
        places = []
        for tensor in tensors:
            place = next((place for place in known if place.source() is tensor), None)
            if place is None:
                place = _Place(tensor)
                known.append(place)
            places.append(place)
        return places

    def buffer(self, name, shape, dtype, device):
        """Return memory for what is read as soon as it is written. It is not the graphs', which
        lose theirs with the last graph."""
        key = name, shape, dtype
        if key not in self.buffers:
            self.buffers[key] = torch.empty(shape, dtype=dtype, device=device)
        return self.buffers[key]

    def waiting_calls(self) -> list[_Call]:
        """Return the calls that wait for their backward, in the order of their graphs' numbers."""
        calls = [reference() for reference in self.waiting]
        calls = [call for call in calls if call is not None and not call.is_done]
        self.waiting = [weakref.ref(call) for call in calls]
        return calls

    def may_run(self, number) -> bool:
        """Return True if no graph of this number, or recorded later, waits for its backward."""
        while self.waiting:
            call = self.waiting[-1]()
            if call is not None and not call.is_done:
                return call.graph.number < number
            self.waiting.pop()
        return True

    def is_out_of_order(self, graph) -> bool:
        """Return True if it may not run, and not because a call of its own waits."""
        if self.may_run(graph.number):
            return False
        return all(call.graph is not graph for call in self.waiting_calls())


class _Place:
    """Memory that graphs read an argument from. It notes which tensor was copied there last."""

    def __init__(self, tensor):
        self.tensor = torch.empty_like(tensor)
        self.source = weakref.ref(tensor)
        self.version = None  # of what was copied: nothing so far

    def set_source(self, tensor):
        self.source = weakref.ref(tensor)
        self.version = tensor._version

    def holds(self, tensor) -> bool:
        return self.source() is tensor and self.version == tensor._version


# ---- graphs ----


class _Graph:
    """The graphs of a layer for one kind of call."""

    def __init__(self, stack, state, x, kwargs, places, first):
        self.stack = stack
        self.state = state
        self.number = next(stack.recorded)
        self.first = first
        self.places = places
        self.trainable = [p for p in state.layer.parameters() if p.requires_grad]
        # What is recorded of autograd ends at these. A parameter's own node runs on the stream on
        # which the parameter was first used.
        self.aliases = [torch.nn.Parameter(p.detach()) for p in self.trainable]
        self.has_backward = torch.is_grad_enabled() and (x.requires_grad or bool(self.trainable))
        self.make_autocast = devices.snapshot_autocast(x.device)
        if self.has_backward:
            self.x = torch.empty_like(x).requires_grad_(x.requires_grad)
        else:
            self.x = stack.buffer("x", x.shape, x.dtype, x.device)
        tensors = iter([place.tensor for place in places])
        self.kwargs = {name: _replaced(value, tensors) for name, value in kwargs.items()}
        self.y = stack.buffer("y", first.shape, first.dtype, x.device)
        self.dy = stack.buffer("dy", first.shape, first.dtype, x.device)

    # ---- recording ----

    def record(self, run, x, tensors):
        """Record both graphs.

        Raises:
            Exception: whatever the layer does that no graph can hold.
        """
        recorder = self.stack.recorder
        self._copy_inputs(x, tensors, self.stack.waiting_calls())
        self.dy.zero_()
        recorder.rehearse(functools.partial(self._rehearse, run))
        self.forward_graph = recorder.record(functools.partial(self._run_forward, run))
        if not self.has_backward:
            return
        used = [i for i, grad in enumerate(self.grads) if grad is not None]
        self.grads = [
            None if grad is None else self.stack.buffer(("gradient", i), p.shape, p.dtype, p.device)
            for i, (grad, p) in enumerate(zip(self.grads, [self.x, *self.aliases], strict=True))
        ]
        self.backward_graph = recorder.record(self._run_backward)
        # a parameter that the layer does not use gets no gradient, and its hooks are not called
        self.trainable = [self.trainable[i - 1] for i in used if i > 0]
        self.aliases = [self.aliases[i - 1] for i in used if i > 0]
        self.grads = [self.grads[0], *(self.grads[i] for i in used if i > 0)]

    def _rehearse(self, run):
        """Run forward and backward before any capture, from which PyTorch does not recover well."""
        self._run_forward(run)
        if self.has_backward:
            leaves = {id(leaf) for leaf in (self.x, *self.aliases)}
            if not _leaves(self.edge.node) <= leaves:
                raise NotRecordable("what it trains is not among its parameters")
            self.grads = self._gradients(self.edge, self.x, self.aliases)
            del self.edge

    def _run_forward(self, run):
        with torch.set_grad_enabled(self.has_backward), self._autocast(), self._with_aliases():
            y = run(self.x, **self.kwargs)
        with torch.no_grad():
            self.y.copy_(y)
        if self.has_backward:
            self.edge = get_gradient_edge(y)  # holds what forward saves, but not y

    def _run_backward(self):
        # a checkpoint calls the layer again
        with self._with_aliases(), recorded_backward(self.edge.node):
            grads = self._gradients(self.edge, self.x, self.aliases, retain_graph=True)
        pairs = [(to, grad) for to, grad in zip(self.grads, grads, strict=True) if to is not None]
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))

    def _gradients(self, y, x, parameters, dy=None, **options):
        inputs = [x, *parameters] if x.requires_grad else parameters
        dy = self.dy if dy is None else dy
        with devices.without_autocast(x):
            grads = torch.autograd.grad([y], inputs, [dy], allow_unused=True, **options)
        return grads if x.requires_grad else (None, *grads)

    @contextlib.contextmanager
    def _autocast(self):
        """As it is now, but without copies of weights from before, or for after."""
        with self.make_autocast():
            was_enabled = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(was_enabled)

    @contextlib.contextmanager
    def _with_aliases(self):
        """Give the modules, for a while, the aliases in the place of the parameters."""
        alias_of = dict(zip(map(id, self.trainable), self.aliases, strict=True))
        replaced = [
            (module._parameters, name, p)
            for module in self.state.modules
            for name, p in module._parameters.items()
            if id(p) in alias_of
        ]
        try:
            for parameters, name, p in replaced:
                parameters[name] = alias_of[id(p)]
            yield
        finally:
            for parameters, name, p in replaced:
                parameters[name] = p

    # ---- replaying ----

    def may_replay(self, tensors) -> bool:
        stack = self.stack
        if not stack.may_run(self.number):
            return False
        if all(map(_Place.holds, self.places, tensors)):
            return True
        needed = _needed(stack.waiting_calls())
        pairs = zip(self.places, tensors, strict=True)
        return all(place not in needed or place.holds(tensor) for place, tensor in pairs)

    def _copy_inputs(self, x, tensors, waiting):
        """Copy the arguments, but for those that waiting calls have in the same places."""
        needed = _needed(waiting)
        targets, sources = [self.x], [x]
        for place, tensor in zip(self.places, tensors, strict=True):
            if place not in needed:
                targets.append(place.tensor)
                sources.append(tensor)
                place.set_source(tensor)
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)

    def forward(self, x, tensors):
        self._copy_inputs(x, tensors, self.stack.waiting_calls())
        self.forward_graph.replay()
        return self.y.clone()

    def backward(self, dy):
        self.dy.copy_(dy)
        self.backward_graph.replay()
        dx, *grads = self.grads
        # of one dtype in one launch, each with its own memory
        copies = torch._foreach_mul(grads, 1) if grads else []
        return [dx if dx is None else dx.clone(), *copies]

    def compute_again(self, run, dy):
        """Return the gradients without a replay, from the inputs of the last forward.

        Raises:
            RuntimeError: the layer is not what it was in forward.
        """
        if not self.state.is_unchanged():
            raise RuntimeError(
                "cuda_graphs: a layer was changed (an adapter, a mode, a hook, an attribute) "
                "between its forward and this backward, which has to compute it again: the graph "
                "is kept, autocast is on, another forward came in between, or a backward failed"
            )
        with torch.enable_grad(), self.make_autocast():
            x = self.x.detach().requires_grad_(self.x.requires_grad)
            y = run(x, **self.kwargs)
        return self._gradients(y, x, self.trainable, dy)


def _needed(calls):
    return {place for call in calls for place in call.graph.places}


def _replaced(value, tensors):
    """Return an argument with its tensors replaced."""
    if type(value) is tuple:
        return tuple(_replaced(item, tensors) for item in value)
    return next(tensors) if type(value) is torch.Tensor else value


def _leaves(node) -> set[int]:
    """Return the ids of the tensors that gradients go to, from a node of autograd's on."""
    leaves, seen, nodes = set(), set(), [node]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    return leaves


class _Call:
    """A call that waits for its backward."""

    def __init__(self, graph):
        self.graph = graph
        self.was_replayed = False  # its backward may have overwritten what forward saved
        self.is_done = False


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, run, tensors, x, *trainable):
        ctx.run = run
        ctx.call = _Call(graph)
        # as without a graph, their versions are compared, and a second backward raises
        ctx.save_for_backward(*graph.state.weights)
        y = graph.forward(x, tensors)
        graph.stack.waiting.append(weakref.ref(ctx.call))
        return y

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a layer that runs as a CUDA graph has no second derivatives: patch the model "
                "without cuda_graphs"
            )
        _ = ctx.saved_tensors
        graph = ctx.call.graph
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        may_replay = graph.stack.may_run(graph.number + 1)
        if is_kept or ctx.call.was_replayed or not may_replay or devices.in_autocast(dy):
            grads = graph.compute_again(ctx.run, dy)
        else:
            ctx.call.was_replayed = True
            grads = graph.backward(dy)
        ctx.call.is_done = not is_kept
        return None, None, None, *grads
