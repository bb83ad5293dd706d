"""What stands for the logits in a training step: a tensor of their shape, without their memory.

The head computes the loss in its own call, so that the hooks of FSDP, ZeRO, PEFT and accelerate run
around it, and returns a `Logits`. Its elements are NaN and all in one place; its gradient is the
loss's. It is right whatever is done to it:

* a scale, a cap or a cast by Python numbers is recorded, not done (`Transform`);
* the family's loss function takes the loss out of it, if that was computed with what is recorded
  (`loss_in_head`);
* whatever else is done to it is done to real logits, made then and there by one more call of the
  head;
* what looks at values where real logits come too late raises `LogitsNeeded`, and the model's call
  starts again with real logits: a hook of the head, an autograd Function, into whose graph nothing
  can be put any more, or code that torch functions do not show (TorchScript, vmap, C++, a compiled
  function);
* an error of the stand-in's own does the same, so that whoever swallows it gets the family's
  result.

Under torch.compile the logits are real: in the graph they are dead code if nothing but the loss is
made of them. There `TracedLogits` tells by identity whether the loss function got what the head
gave, and what was recorded in between."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from liger_kernel.core import devices
from liger_kernel.core.op import custom_op

T = torch.Tensor


class _Thread(threading.local):
    """Has a request from the beginning: torch.compile guards on who has a name."""

    def __init__(self):
        self.request = None


_thread = _Thread()


def current():
    """This thread's request: what the innermost call of a patched model asks of its head."""
    return _thread.request


def ask(request):
    """Make it this thread's request; the one before it is returned, to be put back."""
    before = current()
    _thread.request = request
    return before


class LogitsNeeded(BaseException):
    """Real logits are needed in a place where they come too late. No ``except Exception`` of a
    forward's catches it."""


# ---- what is done to logits by Python numbers ----


class Transform(NamedTuple):
    """``softcap·tanh(scale·x / softcap)``, or ``scale·x``."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, x):
        x = x if self.scale == 1.0 else x * self.scale
        return x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)

    def same(self, other) -> bool:
        """The same function, up to the order in which its numbers were multiplied."""
        if (self.softcap is None) != (other.softcap is None):
            return False
        return _near(self.scale, other.scale) and (
            self.softcap is None or _near(self.softcap, other.softcap)
        )


def _near(a, b) -> bool:
    return abs(a - b) <= 1e-6 * abs(b)


_TIMES = {T.mul, T.__mul__, T.__rmul__, T.multiply, torch.mul, torch.multiply}
_OVER = {T.div, T.__truediv__, T.true_divide, T.divide, torch.div, torch.true_divide, torch.divide}
_TANH = {T.tanh, torch.tanh}
_CASTS = {
    T.float: torch.float32,
    T.bfloat16: torch.bfloat16,
    T.half: torch.float16,
    T.double: torch.float64,
}
_NOTHING = {T.contiguous, T.clone, torch.clone}


def recorded(before: Transform, function, args, kwargs) -> Transform | None:
    """What the logits have become by ``function(logits, ...)``; None if that is no scale, cap or
    cast by numbers.

    The kernels compute in fp32 whatever the cast.
    """
    scale, softcap = before
    if kwargs:
        return None
    if len(args) == 1:
        if function in _TANH and softcap is None:
            return Transform(scale, 1.0)
        return before if function in _CASTS or function in _NOTHING else None
    if function is T.__getitem__ and not torch.compiler.is_compiling():
        return before if _is_all(*args) else None
    if len(args) != 2 or not (function in _TIMES or function in _OVER):
        return None
    x, number = args
    if function in _TIMES and not isinstance(x, T):
        x, number = number, x
    if (
        not isinstance(x, T)
        or not isinstance(number, (int, float))
        or not 0 < abs(number) < float("inf")
    ):
        return None
    if function in _OVER:
        number = 1.0 / number
    if softcap is None:
        return Transform(scale * number)
    # number·softcap·tanh(scale·x / softcap): another softcap, with a scale that leaves what is
    # inside as it is
    return Transform(scale * number, softcap * number) if number > 0 else None


def _is_all(x, index) -> bool:
    """Whether ``x[index]`` is all of x."""
    index = index if type(index) is tuple else (index,)
    if len(index) > x.dim() or not all(type(i) is slice for i in index):
        return False
    return all(i.indices(size) == (0, size, 1) for i, size in zip(index, x.shape, strict=False))


# ---- in eager mode ----


class _Stand(torch.autograd.Function):
    """A loss as a tensor of the logits' shape. Back comes what `_Loss` sends: the loss's gradient,
    everywhere."""

    @staticmethod
    def forward(ctx, loss, shape):
        nan = loss.new_full((), float("nan"))
        return T._make_subclass(
            Logits, _in_one_place(nan.untyped_storage(), shape, nan.dtype, nan.device)
        )

    @staticmethod
    def backward(ctx, gradient):
        if any(
            stride and size > 1
            for stride, size in zip(gradient.stride(), gradient.shape, strict=True)
        ):
            raise RuntimeError(
                "liger-kernel: a gradient of the logits reached what stands for them in a patched model's training "
                "step; call the model with skip_logits=False"
            )
        return gradient[(0,) * gradient.dim()], None


def _in_one_place(storage, shape, dtype, device):
    """No view, for FSDP wants none."""
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, (0,) * len(shape))


class _Loss(torch.autograd.Function):
    """The loss that a `Logits` carries."""

    @staticmethod
    def forward(ctx, logits, loss):
        ctx.shape = logits.shape
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape), None


class Source:
    """One call of a head: where its real logits come from."""

    def __init__(self, request, head, hidden_states, dtype, again):
        self.request, self.head, self.hidden_states, self.dtype = (
            request,
            head,
            hidden_states,
            dtype,
        )
        self.again = again  # whether a second call would give the same (dropout in a head does not)
        self.learning = torch.is_grad_enabled()
        self.autocast = devices.autocast_as_now(hidden_states.device)
        self.version = None if hidden_states.is_inference() else hidden_states._version
        self.asked = self.versions = self.result = None  # of the loss that was computed
        self.taken = False  # whether it is in somebody's graph
        self.logits = None

    def call_again(self):
        """Its head, as it was called: under the same autocast, and of the same hidden states."""
        if self.version is not None and self.hidden_states._version != self.version:
            raise self.request.needs("its forward writes to what its head has read")
        with self.autocast():
            return self.head(self.hidden_states)

    def real(self):
        if self.logits is None:
            if place() != self.request.place and torch.is_grad_enabled():
                raise self.request.needs("a checkpoint takes its logits")
            if self.request.closed:
                raise RuntimeError(
                    "liger-kernel: logits of a training step are asked for when it is over, and were not kept; call "
                    "the patched model with skip_logits=False"
                )
            if not self.again:
                raise self.request.needs("its head gives other logits when it is called again")
            if torch.jit.is_tracing():
                raise self.request.needs("its forward traces what it does to its logits")
            before = ask(None)
            try:
                with (
                    torch.inference_mode(self.hidden_states.is_inference()),
                    torch.set_grad_enabled(self.learning),
                ):
                    self.logits = self.call_again()
                self.request.made = True
            finally:
                ask(before)
            for stand in living(self.request.stands):  # before anything is written to them
                if stand._source is self:
                    stand._make(self.logits)
        return self.logits


_ATTRIBUTES = (
    "shape", "ndim", "device", "layout", "requires_grad", "is_leaf", "output_nr", "_base", "_version",
    "is_cpu", "is_cuda", "is_xpu", "is_meta", "is_sparse", "is_quantized", "is_nested",
)  # fmt: skip
# the same of what stands for the logits as of them
_KNOWN = {getattr(T, name).__get__ for name in _ATTRIBUTES} | {
    T.size, T.dim, T.ndimension, T.numel, T.nelement, T.get_device, T.__len__, T.is_complex, T.is_floating_point,
    T._is_view, torch.numel, torch.is_complex, torch.is_floating_point,
}  # fmt: skip
_MOVES = {T.to, T.cuda, T.cpu}
_OF_GRADIENTS = {T.register_hook, T.retain_grad, T.requires_grad_, T.backward, torch.autograd.grad}
_SAME_MEMORY = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
OURS = __name__.partition(".")[0] + "."
LIBRARIES = (
    "torch.distributed.",
    "torch.utils.",
    "deepspeed.",
    "accelerate.",
    "peft.",
    "transformers.",
)


class Logits(torch.Tensor):
    """See the top of this file."""

    _source = None

    @staticmethod
    def standing_for(source: Source, loss, shape) -> Logits:
        return _derived(_Stand.apply(loss, shape), source, source.dtype, Transform(), ())

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (
            isinstance(function, torch._ops.OpOverload) and _is_below_autograd()
        ):  # a dispatch mode's call
            return cls.__torch_dispatch__(function, types, args, kwargs)
        try:
            out = cls._of_stand_in(function, args, kwargs)
            if out is not NotImplemented:
                return out
            if function in _OF_GRADIENTS or function is T.grad_fn.__get__:
                tree_map(_refuse_if_taken, (args, kwargs))
            args, kwargs = tree_map(lambda x: x.real() if type(x) is Logits else x, (args, kwargs))
        except Exception as error:
            raise _failure(error, args, kwargs) from error
        return function(*args, **kwargs)  # an error in it is the caller's own

    @classmethod
    def _of_stand_in(cls, function, args, kwargs):
        """The result of ``function`` where it needs no logits, or NotImplemented."""
        self = next((a for a in args if type(a) is Logits), None)
        if self is None or self._made is not None:
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            if function in _KNOWN or function is T.register_hook and is_of_a_library(args[1]):
                return function(*args, **kwargs)
            if function is T.dtype.__get__:
                return self._dtype
            if function is T.detach or function is torch.detach:
                if (
                    self._is_hidden_from_graphs()
                    and _in_autograd_function()
                    and not _is_in_a_librarys_function()
                ):
                    raise self._unseen("an autograd Function")
                return self._then(T.detach(self).as_subclass(Logits))
            if function is T.requires_grad_ and not self.requires_grad:
                raise self._unseen(
                    "something that learns"
                )  # a parameter has to be what it is made of
            if self._is_hidden_from_graphs():
                return NotImplemented
            moved = self._moved(function, args, kwargs) if function in _MOVES else None
            if moved is not None:
                return moved
            transform = recorded(self._transform, function, args, kwargs)
            if transform is None:
                return NotImplemented
            dtype = _CASTS.get(function, self._dtype)
            same = transform is self._transform and dtype == self._dtype
            if same and function not in (T.clone, torch.clone):
                return self
            step = function, tuple(None if a is self else a for a in args)
            return self._then(self.as_subclass(Logits), transform, dtype, step)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """What no torch function has shown: TorchScript, vmap, a tensor's constructor, C++."""
        kwargs = kwargs or {}
        try:
            if function in _SAME_MEMORY:
                return args[0]._in_same_memory()
            args, kwargs = tree_map(
                lambda x: x._below_functions() if type(x) is Logits else x, (args, kwargs)
            )
        except Exception as error:
            raise _failure(error, args, kwargs) from error
        return function(*args, **kwargs)

    def _in_same_memory(self):
        with torch._C.DisableTorchFunctionSubclass():
            memory = _in_one_place(self.untyped_storage(), self.shape, self.dtype, self.device)
            same = T._make_subclass(Logits, memory)
        return same if self._source is None else self._then(same)

    def __tensor_flatten__(self):
        """torch.compile asks for it where a compiled function is given logits."""
        raise self._unseen("a compiled function")

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        raise NotImplementedError

    def _below_functions(self):
        with torch._C.DisableTorchFunctionSubclass():
            if self._made is None or self.requires_grad:
                raise self._unseen("TorchScript, vmap or C++ code")
        return self._made

    def _unseen(self, who) -> BaseException:
        """What to raise where what is done to the logits does not get into the graph, or is not
        seen."""
        request = self._source.request
        if request.closed:
            return RuntimeError(
                f"liger-kernel: {who} is given logits of a training step that is over; call the patched model with "
                "skip_logits=False"
            )
        return request.needs(f"{who} takes its logits")

    def _then(self, logits, transform=None, dtype=None, *step):
        transform = self._transform if transform is None else transform
        return _derived(
            logits, self._source, dtype or self._dtype, transform, (*self._steps, *step)
        )

    def _moved(self, function, args, kwargs):
        """To another device or dtype; None if it is none of that."""
        try:
            device, dtype = _destination(function, args[1:], kwargs)
        except (TypeError, RuntimeError):
            return None
        out = self
        if dtype not in (None, self._dtype):
            out = out._then(out.as_subclass(Logits), None, dtype, (T.to, (None, dtype)))
        if device is not None and (device.type, device.index or 0) != (
            out.device.type,
            out.device.index or 0,
        ):
            loss = _Loss.apply(out, T.new_zeros(out, ())).to(device)
            out = out._then(_Stand.apply(loss, out.shape), None, None, (T.to, (None, device)))
        return out

    def _make(self, x):
        """The real ones, from those that the head has given."""
        with torch._C.DisableTorchFunctionSubclass():
            learns = self.requires_grad
        with torch.set_grad_enabled(learns):
            for function, args in self._steps:
                x = function(*(x if a is None else a for a in args))
        self._made = x if learns or not x.requires_grad else x.detach()

    def real(self) -> torch.Tensor:
        if self._is_hidden_from_graphs() and _in_autograd_function():
            raise self._unseen("an autograd Function")
        if self._made is None:
            if _is_being_called(self._source.head):
                raise self._source.request.needs("a hook of its head reads its logits")
            self._source.real()
        return self._made

    def _is_hidden_from_graphs(self) -> bool:
        """Whether nothing that is done here gets into the graph: under no_grad, or in an autograd
        Function."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.requires_grad and not torch.is_grad_enabled()

    def loss(self, value):
        """The loss that was computed in the head, with the hooks of the head in its graph."""
        with torch._C.DisableTorchFunctionSubclass():
            return _Loss.apply(
                self, value.detach().to(self.device)
            )  # its gradient takes the way through self


def _derived(logits, source, dtype, transform, steps) -> Logits:
    logits._source, logits._dtype, logits._transform, logits._steps, logits._made = (
        source, dtype, transform, steps, None,
    )  # fmt: skip
    source.request.stands.append(weakref.ref(logits))
    return logits


def living(stands) -> list[Logits]:
    return [stand for stand in (reference() for reference in stands) if stand is not None]


def _destination(function, args, kwargs):
    """-> (device, dtype) of `Tensor.to`, ``cuda``, ``cpu`` and their like, None where it stays."""
    if function is T.to:
        if args and isinstance(args[0], T):
            return args[0].device, args[0].dtype
        return torch._C._nn._parse_to(*args, **kwargs)[:2]
    if args or kwargs:
        raise TypeError
    return torch.device("cpu") if function is T.cpu else torch.device(
        "cuda", torch.cuda.current_device()
    ), None


def _refuse_if_taken(x):
    """The gradient of a loss that was taken already does not pass through real logits."""
    if type(x) is Logits and x._source.taken and not x._source.request.closed:
        raise x._source.request.needs("its forward wants gradients of its logits")
    return x


def place():
    """Where a head is called: with gradients or without, and within which checkpoint."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_of_a_library(hook) -> bool:
    """Whether it is one of those that look at no values, or a function of theirs."""
    hook = getattr(hook, "func", hook)  # of a functools.partial
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith(LIBRARIES)


def _is_below_autograd() -> bool:
    """Whether autograd has been passed already, as a ``TorchDispatchMode`` finds it: nothing here
    gets into a graph."""
    key = torch._C.DispatchKey.AutogradFunctionality
    return (
        torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        and not torch.is_inference_mode_enabled()
    )


def _in_autograd_function() -> bool:
    """Whether the forward of an autograd Function is running: it turns forward-mode gradients off,
    no_grad does not."""
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def _frames():
    """Those of the callers, from the innermost."""
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _first_argument(frame):
    first = frame.f_code.co_varnames[:1]
    return frame.f_locals.get(*first) if first else None


def _is_in_a_librarys_function() -> bool:
    """Whether the autograd Function whose forward is running is a library's: DeepSpeed's only
    detach.

    It is known by its ctx; a forward that has none (``setup_context``), by the file of the code
    that takes the logits."""
    for frame in _frames():
        function = getattr(type(_first_argument(frame)), "_forward_cls", None)
        if function is not None:
            return is_of_a_library(function)
        file = frame.f_globals.get("__name__", "")
        if not file.startswith(("torch.", OURS)):
            return file.startswith(LIBRARIES)
    return False


def _is_being_called(module) -> bool:
    call = torch.nn.Module._call_impl.__code__
    return any(frame.f_code is call and _first_argument(frame) is module for frame in _frames())


def _failure(error, args, kwargs) -> BaseException:
    """What to raise where the stand-in itself has failed in a torch function with these
    arguments."""
    sources = [x._source for x in tree_leaves((args, kwargs)) if type(x) is Logits]
    requests = {source.request for source in sources if source is not None}
    failures = [request.failure(error) for request in requests]
    return failures[0] if failures else error


# ---- under torch.compile ----


class TracedLogits(torch.Tensor):
    """Real logits in a graph. Its request knows which tensor the loss function has to be given, and
    what was recorded.

    Whatever else is done to one of them, be it in place, makes the loss that of the logits.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs, request = kwargs or {}, current()
        with torch._C.DisableTorchFunctionSubclass():
            if (
                not torch.compiler.is_dynamo_compiling()
            ):  # between two graphs, or the compiler itself looks at it
                return function(*args, **kwargs)
            # not the subclass by itself: Dynamo of torch 2.11 looks at types all the same
            given = (args, kwargs) if function in _OF_GRADIENTS else tree_map(real, (args, kwargs))
            out = function(*given[0], **given[1])
            if (
                request is None
                or request.traced is None
                or function in _KNOWN
                or function is T.dtype.__get__
            ):
                return out
            transform = None
            if args and args[0] is request.traced and torch.is_grad_enabled() == request.learning:
                transform = recorded(request.transform, function, args, kwargs)
            if transform is None:
                request.traced = None
                return out
            return request.trace(out, transform)


def _count_writes(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(0 if x.is_inference() else x._version, 0)


_counted = custom_op("count_writes", _count_writes)(_count_writes)


def writes(x) -> int:
    """How often a tensor has been written to in this graph, for code that Dynamo traces.

    Dynamo calls no torch function for some of what writes. The count has to be a shape: of
    ``_version`` it makes a number that is not known in the graph."""
    return _counted(x).shape[0]


def real(x):
    """A tensor as everybody knows it; whatever else it is given, as it is."""
    if type(x) is Logits:
        return x.real()
    if type(x) is not TracedLogits:
        return x
    request = current()
    for traced, logits in () if request is None else request.pairs:
        if (
            x is traced
        ):  # no operation on the subclass itself: AOTAutograd knows it not, where it comes into a graph
            return logits
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ops.aten.alias(x)  # as_subclass is nothing that Dynamo knows in this direction
