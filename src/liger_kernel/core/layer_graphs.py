"""CUDA graphs of a layer's calls: forward and backward are recorded once and replayed, so that
neither costs the host more than a few launches.

    stack = LayerStack()                       # of layers that run one after another
    y = stack.call(layer, run, x, kwargs)      # what run(x, **kwargs) gives

``run`` is the layer's own call, with its checkpoint if it has one. The first call of a kind runs as
it is. The second one records two graphs: forward, and the backward of the same tensors, by
autograd. From then on a call copies its inputs to where the graphs read, replays forward, and
returns a copy of the output; backward does the same with gradients. Addresses are recorded, values
are not: weights may be written to between steps, as optimizers do.

Kind of a call: what a graph fixes beside the layer itself. See `_kind`.

A replay would be wrong, and the layer runs as it is, if

* the layer is no longer what was recorded: `LayerState` holds everything that the modules within
  have, by identity;
* something looks at the call or changes it: hooks, modes, torch.func, a compiler, a capture around
  it, another thread;
* the layer draws random numbers;
* an argument is no plain tensor on the GPU, number, string or None;
* what it would overwrite is still needed. The graphs of a stack share memory. A graph that was
  recorded later may keep its tensors for backward where an earlier one computes. So a graph runs
  only while none that was recorded later, nor itself, waits for its backward. `LayerStack` knows
  these; in backward, which could not run as it is, such a layer is computed once more.

What is not looked at: functions that are replaced in other modules, and what the objects that a
module refers to have within them. So this is only done if it is asked for.

After ``torch.cuda.make_graphed_callables``, which records all layers beforehand for one kind of
call, and keeps no count of what waits."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import threading
import weakref

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as torch_modules

from liger_kernel.core import devices

logger = logging.getLogger(__name__)

MAX_KINDS = 4  # of calls that are recorded of a layer: each kind keeps tensors of its own
MAX_STATES = 4  # of a layer: its adapters switched off and on are two
FIRST = "first call"
PLAIN_VALUES = type(None), bool, int, float, str, torch.dtype, torch.device, tuple
HOOK_ATTRIBUTES = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
CONTAINERS = dict, list


# ---- what must not change ----


class LayerState:
    """What the modules of a layer consist of: their classes, all their attributes, what the dicts
    and lists among them hold, and where the weights lie."""

    def __init__(self, layer):
        self.modules = [*layer.modules()]
        self.tensors = [*layer.parameters(), *layer.buffers()]
        self.trainable = [p for p in layer.parameters() if p.requires_grad]
        self.recorded = self._read()
        self.kinds = {}  # of calls -> FIRST after the first call, then the graphs

    def _read(self):
        owners = [*self.modules, *self.tensors]
        owners += {id(c): c for m in self.modules if (c := getattr(m, "config", None))}.values()
        attributes = [vars(owner) for owner in owners if hasattr(owner, "__dict__")]
        values, containers = [*map(type, self.modules)], []
        for value in itertools.chain.from_iterable(map(dict.values, attributes)):
            (containers if isinstance(value, CONTAINERS) else values).append(value)
        dicts = [container for container in containers if isinstance(container, dict)]
        values += itertools.chain.from_iterable(containers)
        values += itertools.chain.from_iterable(map(dict.values, dicts))
        numbers = [*map(len, attributes), *map(len, containers)]
        numbers += [(p.data_ptr(), p.requires_grad) for p in self.tensors]
        return values, numbers

    def is_unchanged(self) -> bool:
        values, numbers = self._read()
        recorded, recorded_numbers = self.recorded
        return numbers == recorded_numbers and (
            all(map(operator.is_, values, recorded)) or all(map(_is_same, values, recorded))
        )

    def refusal(self, x) -> str | None:
        """Return why this layer is not recorded, or None."""
        if any(getattr(m, name) for m in self.modules for name in HOOK_ATTRIBUTES):
            return "it has hooks"
        if not all(_is_plain(p) for p in self.tensors):
            return "its weights are not plain tensors"
        if not all(p.device == x.device for p in self.tensors):
            return "its weights are not all on one device"
        if any(type(p) is not torch.nn.Parameter for p in self.trainable):
            return "what it trains is no plain parameter"
        return None


def _is_plain(tensor):
    """Return True for tensors and parameters, those of bitsandbytes too, but not for a DTensor."""
    cls = type(tensor)
    return cls is torch.Tensor or issubclass(cls, torch.nn.Parameter)


def _is_same(a, b):
    return a is b or (type(a) is type(b) and type(a) in PLAIN_VALUES and a == b)


def _flatten(kwargs, device):
    """Return the tensors among the arguments, and the rest as something to compare; None if there
    is anything else."""
    tensors, rest = [], []
    for name, value in kwargs.items():
        for item in value if type(value) is tuple else (value,):
            if type(item) is torch.Tensor:
                if item.requires_grad or item.device != device:
                    return None
                tensors.append(item)
                item = item.shape, item.stride(), item.dtype
            elif type(item) not in PLAIN_VALUES:
                return None
            rest.append((name, type(value), item))
    return tensors, tuple(rest)


def _kind(x, rest):
    return (
        x.shape,
        x.stride(),
        x.dtype,
        x.requires_grad,
        rest,
        torch.is_grad_enabled(),
        devices.autocast_dtype(x),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
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


# ---- layers ----


class LayerStack:
    """Layers that run one after another, with the memory that their graphs share.

    A copy, or what a pickle gives, has no graphs yet."""

    def __init__(self):
        self.recorder = devices.GraphRecorder()
        self.states = weakref.WeakKeyDictionary()  # layer -> its states, the last one used first
        self.refusals = weakref.WeakKeyDictionary()  # layer -> why it is not recorded
        self.recorded = itertools.count()
        self.waiting = []  # weak references to calls that wait for their backward, in order
        self.buffers = {}
        self.places = {}  # kind -> the tensor arguments of its calls, and where the graphs read

    def __deepcopy__(self, memo):
        return LayerStack()

    def __reduce__(self):
        return LayerStack, ()

    def call(self, layer, run, x, kwargs, run_recordable=None):
        """Return ``run(x, **kwargs)``, by a graph where that is the same.

        ``run_recordable``: computes the same in a way that can be recorded, if ``run`` can't."""
        if type(x) is not torch.Tensor or layer in self.refusals or _is_seen():
            return run(x, **kwargs)
        arguments = _flatten(kwargs, x.device)
        if arguments is None or not self.recorder.takes(x):
            return run(x, **kwargs)
        tensors, rest = arguments
        kinds = self._kinds(layer, x)
        kind = _kind(x, rest)
        if kinds is None or (kind not in kinds and len(kinds) == MAX_KINDS):
            return run(x, **kwargs)
        if kind not in kinds:
            return self._call_first(layer, run, x, kwargs, kinds, kind)
        if kinds[kind] is FIRST:
            run_recordable = run_recordable or run
            kinds[kind] = self._record(layer, run_recordable, x, kwargs, kind, tensors)
        graph = kinds[kind]
        if graph is None or not graph.may_replay(x, tensors):
            return run(x, **kwargs)
        if not graph.has_backward:
            return graph.forward(x, tensors)
        return _Replay.apply(graph, run_recordable or run, tensors, x, *graph.trainable)

    def _kinds(self, layer, x) -> dict | None:
        """Return the kinds of calls of the layer as it is now; None if it is not recorded."""
        states = self.states.setdefault(layer, [])
        for state in states:
            if state.is_unchanged():
                return state.kinds
        state = LayerState(layer)
        reason = state.refusal(x)
        if reason is None and len(states) == MAX_STATES:
            reason = "it changes again and again"
        if reason is not None:
            self._refuse(layer, reason)
            return None
        states.append(state)
        return state.kinds

    def _refuse(self, layer, reason):
        self.refusals[layer] = reason
        logger.info("%s runs without a CUDA graph: %s", type(layer).__name__, reason)

    def _call_first(self, layer, run, x, kwargs, kinds, kind):
        drawn = self.recorder.random_numbers(x)
        y = run(x, **kwargs)
        kinds[kind] = FIRST
        if self.recorder.random_numbers(x) != drawn:
            self._refuse(layer, "it draws random numbers")
        elif type(y) is not torch.Tensor:
            self._refuse(layer, "it returns more than a tensor")
        return y

    def _record(self, layer, run, x, kwargs, kind, tensors):
        graph = _Graph(self, layer, x, kwargs, self._places(kind, tensors))
        try:
            graph.record(layer, run, x, tensors)
        except Exception as error:
            self._refuse(layer, f"it can't be recorded: {type(error).__name__}: {error}")
            return None
        return graph

    # ---- memory ----

    def _places(self, kind, tensors) -> list:
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

    def buffer(self, name, like):
        """Return memory outside the graphs for what is read as soon as it is written."""
        key = name, like.shape, like.dtype
        if key not in self.buffers:
            self.buffers[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return self.buffers[key]

    # ---- calls that wait for their backward ----

    def waiting_calls(self) -> list:
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


class _Place:
    """Where graphs read an argument, and the tensor that was copied there last."""

    def __init__(self, tensor):
        self.tensor = torch.empty_like(tensor)
        self.set_source(None)
        self.source = weakref.ref(tensor)

    def set_source(self, tensor):
        self.source = _nothing if tensor is None else weakref.ref(tensor)
        self.version = None if tensor is None else tensor._version

    def holds(self, tensor) -> bool:
        return self.source() is tensor and self.version == tensor._version


def _nothing():
    return None


class _Graph:
    """The graphs of a layer for one kind of call."""

    def __init__(self, stack, layer, x, kwargs, places):
        self.stack = stack
        self.number = next(stack.recorded)
        self.trainable = [p for p in layer.parameters() if p.requires_grad]
        # What is recorded of autograd ends at these. A parameter's own node runs on the stream on
        # which the parameter was first used.
        self.aliases = [torch.nn.Parameter(p.detach()) for p in self.trainable]
        self.places = places
        self.has_backward = torch.is_grad_enabled() and (x.requires_grad or bool(self.trainable))
        self.make_autocast = devices.snapshot_autocast(x.device)
        if self.has_backward:
            self.x = torch.empty_like(x).requires_grad_(x.requires_grad)
        else:
            self.x = stack.buffer("x", x)
        tensors = iter([place.tensor for place in places])
        self.kwargs = {name: _replaced(value, tensors) for name, value in kwargs.items()}

    # ---- recording ----

    def record(self, layer, run, x, tensors):
        self._copy_inputs(x, tensors, self.stack.waiting_calls())
        parameters = self.trainable, self.aliases
        replaced = functools.partial(_replaced_parameters, layer, *parameters)

        def forward():
            with torch.set_grad_enabled(self.has_backward), self._autocast(), replaced():
                y = run(self.x, **self.kwargs)
            self.y = self.stack.buffer("y", y)
            with torch.no_grad():
                self.y.copy_(y)
            if self.has_backward:
                self.edge = get_gradient_edge(y)  # holds what forward saves, but not y

        def backward():
            with replaced():  # a checkpoint calls the layer again
                options = dict(retain_graph=True)
                grads = self._gradients(self.edge, self.x, self.aliases, self.dy, **options)
            self.grads = [
                grad if grad is None else self.stack.buffer(("gradient", i), grad)
                for i, grad in enumerate(grads)
            ]
            torch._foreach_copy_(_present(self.grads), _present(grads))

        self.forward_graph = self.stack.recorder.record(forward)
        if self.has_backward:
            self.dy = self.stack.buffer("dy", self.y)
            self.backward_graph = self.stack.recorder.record(backward)

    def _gradients(self, y, x, parameters, dy, **options):
        inputs = [x, *parameters] if x.requires_grad else parameters
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

    # ---- replaying ----

    def may_replay(self, x, tensors) -> bool:
        stack = self.stack
        if not stack.may_run(self.number):
            return False
        if all(place.holds(t) for place, t in zip(self.places, tensors, strict=True)):
            return True
        needed = {place for call in stack.waiting_calls() for place in call.graph.places}
        return all(
            place not in needed or place.holds(t)
            for place, t in zip(self.places, tensors, strict=True)
        )

    def _copy_inputs(self, x, tensors, waiting):
        """Copy the arguments, but for those that waiting calls have in the same places."""
        needed = {place for call in waiting for place in call.graph.places}
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
        copies = iter(torch._foreach_mul(_present(grads), 1))
        copied = [grad if grad is None else next(copies) for grad in grads]
        return [dx if dx is None else dx.clone(), *copied]

    def compute_again(self, run, dy):
        """Return the gradients without a replay, from the inputs of the last forward."""
        with torch.enable_grad(), self.make_autocast():
            x = self.x.detach().requires_grad_(self.x.requires_grad)
            y = run(x, **self.kwargs)
        return self._gradients(y, x, self.trainable, dy)


@contextlib.contextmanager
def _replaced_parameters(layer, parameters, aliases):
    """Give the modules of a layer, for a while, others in the place of these parameters."""
    alias_of = dict(zip(map(id, parameters), aliases, strict=True))
    replaced = []
    for module in layer.modules():
        for name, p in module._parameters.items():
            if id(p) in alias_of:
                replaced.append((module, name, p))
    try:
        for module, name, p in replaced:
            module._parameters[name] = alias_of[id(p)]
        yield
    finally:
        for module, name, p in replaced:
            module._parameters[name] = p


def _present(tensors):
    return [tensor for tensor in tensors if tensor is not None]


def _replaced(value, tensors):
    """Return an argument with its tensors replaced."""
    if type(value) is tuple:
        return tuple(_replaced(item, tensors) for item in value)
    return next(tensors) if type(value) is torch.Tensor else value


class _Call:
    """A call that waits for its backward."""

    def __init__(self, graph):
        self.graph = graph
        self.is_done = False


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, run, tensors, x, *trainable):
        ctx.run = run
        ctx.call = _Call(graph)
        # as without a graph, their versions are compared, and a second backward raises
        ctx.save_for_backward(*trainable)
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
        if is_kept or not may_replay or devices.in_autocast(dy):
            grads = graph.compute_again(ctx.run, dy)
        else:
            grads = graph.backward(dy)
        ctx.call.is_done = not is_kept
        return None, None, None, *grads
