"""`LogitsPlaceholder`: a tensor of the logits' shape, without their memory, in a training step.

The head computes the loss in its own call, so that the hooks of FSDP, ZeRO, PEFT and accelerate run
around it, and returns a `LogitsPlaceholder`. Its elements are NaN and all in one place. Its
gradient is the loss's. The result is right whatever is done to it:

* A scale, a cap or a cast by Python numbers is recorded, not computed (`transform`).
* The family's loss function takes the loss out of it, if that was computed with what is recorded
  (`request`).
* Whatever else is done to it is done to real logits, made then and there by one more call of the
  head (`HeadCall`).
* What looks at values where real logits come too late raises `LogitsNeeded`, and the model's call
  starts again with real logits. That is a hook of the head, an autograd Function, into whose graph
  nothing can be put any more, or code that torch functions do not show (TorchScript, vmap, C++, a
  compiled function).
* An error in the placeholder's own code starts the call again, too, so that whoever swallows it
  gets the family's result.

Under torch.compile there is no placeholder: see `traced_logits`."""

from __future__ import annotations

import sys
import weakref

import torch
from torch.utils._pytree import tree_leaves, tree_map

from liger_kernel.core import devices
from liger_kernel.patch.loss.active_request import activate
from liger_kernel.patch.loss.transform import CAST_DTYPES, Transform, transform_after

T = torch.Tensor


# ---- where real logits come from ----


class HeadCall:
    """One call of a head, which can be repeated for its real logits or for another loss."""

    def __init__(self, request, head, hidden_states, dtype, repeatable):
        self.request = request
        self.head = head
        self.hidden_states = hidden_states
        self.dtype = dtype  # of the logits
        self.repeatable = repeatable  # False: another call gives other logits (dropout in a head)
        self.grad_enabled = torch.is_grad_enabled()
        self.autocast = devices.snapshot_autocast(hidden_states.device)
        self.version = None if hidden_states.is_inference() else hidden_states._version
        # the loss that was computed in the call: which one, the versions of its labels, and itself
        self.spec = None
        self.label_versions = None
        self.result = None
        self.loss_taken = False  # True: the loss is in the graph of a forward
        self.logits = None  # the real ones, once they are made

    def call_again(self):
        """Call the head as it was called: on the same hidden states, under the same autocast."""
        if self.version is not None and self.hidden_states._version != self.version:
            raise self.request.needs_logits("its forward writes to what its head has read")
        with self.autocast():
            return self.head(self.hidden_states)

    def make_logits(self):
        """Return the real logits of this call. All placeholders of the call get theirs."""
        if self.logits is not None:
            return self.logits
        request = self.request
        if autograd_context() != request.autograd_context and torch.is_grad_enabled():
            raise request.needs_logits("a checkpoint takes its logits")
        if request.closed:
            raise RuntimeError(
                "liger-kernel: logits of a training step are asked for when it is over, and were "
                "not kept; call the patched model with skip_logits=False"
            )
        if not self.repeatable:
            raise request.needs_logits("its head gives other logits when it is called again")
        if torch.jit.is_tracing():
            raise request.needs_logits("its forward traces what it does to its logits")
        before = activate(None)
        try:
            with (
                torch.inference_mode(self.hidden_states.is_inference()),
                torch.set_grad_enabled(self.grad_enabled),
            ):
                self.logits = self.call_again()
            request.made_logits = True
        finally:
            activate(before)
        for placeholder in alive(request.placeholders):  # before anything is written to them
            if placeholder._head_call is self:
                placeholder._set_logits(self.logits)
        return self.logits


def autograd_context():
    """Return what a head is called under: (are gradients enabled, the hooks on saved tensors).

    The hooks tell one checkpoint from another.
    """
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


def alive(references) -> list[LogitsPlaceholder]:
    """Return the placeholders of weak references that still exist."""
    placeholders = (reference() for reference in references)
    return [placeholder for placeholder in placeholders if placeholder is not None]


# ---- the way of the gradient: loss -> placeholder -> loss ----


class _PlaceholderOfLoss(torch.autograd.Function):
    """Makes a placeholder of a loss.

    The gradient that it gets is what `_LossOfPlaceholder` sends: the loss's gradient, everywhere.
    """

    @staticmethod
    def forward(ctx, loss, shape):
        ctx.loss_shape = loss.shape
        nan = loss.new_full((), float("nan"))
        storage = nan.untyped_storage()
        return T._make_subclass(
            LogitsPlaceholder, _one_element_tensor(storage, shape, nan.dtype, nan.device)
        )

    @staticmethod
    def backward(ctx, grad_output):
        dimensions = zip(grad_output.stride(), grad_output.shape, strict=True)
        if any(stride and size > 1 for stride, size in dimensions):
            raise RuntimeError(
                "liger-kernel: a gradient of the logits reached what stands for them in a patched "
                "model's training step; call the model with skip_logits=False"
            )
        return grad_output[(0,) * grad_output.dim()].view(ctx.loss_shape), None


class _LossOfPlaceholder(torch.autograd.Function):
    """Takes the loss out of its placeholder."""

    @staticmethod
    def forward(ctx, placeholder, loss):
        ctx.shape = placeholder.shape
        return loss.clone()

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.expand(ctx.shape), None


def _one_element_tensor(storage, shape, dtype, device):
    """Return a tensor whose elements are all the first of ``storage``.

    It is not a view, as `Tensor.expand` would make: FSDP wants none.
    """
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, (0,) * len(shape))


# ---- the placeholder ----


_ATTRIBUTES = (
    "shape", "ndim", "device", "layout", "requires_grad", "is_leaf", "output_nr", "_base",
    "_version", "is_cpu", "is_cuda", "is_xpu", "is_meta", "is_sparse", "is_quantized", "is_nested",
)  # fmt: skip
# functions whose result is the same for the placeholder as for the logits
METADATA_FUNCTIONS = {getattr(T, name).__get__ for name in _ATTRIBUTES} | {
    T.size, T.dim, T.ndimension, T.numel, T.nelement, T.get_device, T.__len__, T.is_complex,
    T.is_floating_point, T._is_view, torch.numel, torch.is_complex, torch.is_floating_point,
}  # fmt: skip
GRADIENT_FUNCTIONS = {
    T.register_hook,
    T.retain_grad,
    T.requires_grad_,
    T.backward,
    torch.autograd.grad,
}
_DEVICE_FUNCTIONS = {T.to, T.cuda, T.cpu}
_ALIASING_OPS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class LogitsPlaceholder(torch.Tensor):
    """Stands for the logits of one call of a head. See the top of this file.

    Attributes:
        _head_call: the `HeadCall` that it is of.
        _dtype: of the logits, as far as casts were recorded.
        _transform: what was recorded, as the head's loss can compute it.
        _recorded: the same as (function, args), to be done to real logits; None is the logits.
        _logits: the real ones, once they are made.
    """

    _head_call = None

    @staticmethod
    def of_loss(head_call: HeadCall, loss, shape) -> LogitsPlaceholder:
        """Return a placeholder that carries ``loss``."""
        placeholder = _PlaceholderOfLoss.apply(loss, shape)
        return _register(placeholder, head_call, head_call.dtype, Transform(), ())

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(function, torch._ops.OpOverload) and _is_below_autograd():
            # a dispatch mode's call
            return cls.__torch_dispatch__(function, types, args, kwargs)
        try:
            out = cls._answer(function, args, kwargs)
            if out is not NotImplemented:
                return out
            if function in GRADIENT_FUNCTIONS or function is T.grad_fn.__get__:
                tree_map(_refuse_if_loss_taken, (args, kwargs))
            args, kwargs = tree_map(_materialize, (args, kwargs))
        except Exception as error:
            raise _restart_or_error(error, args, kwargs) from error
        return function(*args, **kwargs)  # an error in it is the caller's own

    @classmethod
    def _answer(cls, function, args, kwargs):
        """Return the result of ``function`` where it needs no logits, otherwise NotImplemented."""
        self = next((arg for arg in args if type(arg) is LogitsPlaceholder), None)
        if self is None or self._logits is not None:
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            if function in METADATA_FUNCTIONS:
                return function(*args, **kwargs)
            if function is T.register_hook and is_library_code(args[1]):
                return function(*args, **kwargs)
            if function is T.dtype.__get__:
                return self._dtype
            if function is T.detach or function is torch.detach:
                return self._detach()
            if function is T.requires_grad_ and not self.requires_grad:
                # a parameter has to be what it is made of
                raise self._cannot_follow("something that learns")
            if self._is_hidden_from_graph():
                return NotImplemented
            if function in _DEVICE_FUNCTIONS:
                moved = self._move(function, args, kwargs)
                if moved is not None:
                    return moved
            return self._record(function, args, kwargs)

    def _detach(self):
        in_function = self._is_hidden_from_graph() and _in_autograd_function()
        if in_function and not _in_library_function():
            raise self._cannot_follow("an autograd Function")
        return self._derive(T.detach(self).as_subclass(LogitsPlaceholder))

    def _record(self, function, args, kwargs):
        """Record a scale, a cap or a cast. Returns NotImplemented if ``function`` is none."""
        transform = transform_after(self._transform, function, args, kwargs)
        if transform is None:
            return NotImplemented
        dtype = CAST_DTYPES.get(function, self._dtype)
        unchanged = transform is self._transform and dtype == self._dtype
        if unchanged and function not in (T.clone, torch.clone):
            return self
        call = function, tuple(None if arg is self else arg for arg in args)
        return self._derive(self.as_subclass(LogitsPlaceholder), transform, dtype, call)

    def _move(self, function, args, kwargs):
        """Return the placeholder on another device or of another dtype.

        Returns None if ``function`` asks for something else.
        """
        try:
            device, dtype = _destination(function, args[1:], kwargs)
        except (TypeError, RuntimeError):
            return None
        out = self
        if dtype not in (None, self._dtype):
            same = out.as_subclass(LogitsPlaceholder)
            out = out._derive(same, None, dtype, (T.to, (None, dtype)))
        if device is not None and not _is_same_device(device, out.device):
            loss = _LossOfPlaceholder.apply(out, T.new_zeros(out, ())).to(device)
            moved = _PlaceholderOfLoss.apply(loss, out.shape)
            out = out._derive(moved, None, None, (T.to, (None, device)))
        return out

    def _derive(self, placeholder, transform=None, dtype=None, *recorded):
        """Make ``placeholder`` one of the same call of the head, with what is recorded further."""
        return _register(
            placeholder,
            self._head_call,
            self._dtype if dtype is None else dtype,
            self._transform if transform is None else transform,
            (*self._recorded, *recorded),
        )

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Handle what no torch function has shown: TorchScript, vmap, a constructor, C++."""
        kwargs = kwargs or {}
        try:
            if function in _ALIASING_OPS:
                return args[0]._alias()
            args, kwargs = tree_map(_logits_below_autograd, (args, kwargs))
        except Exception as error:
            raise _restart_or_error(error, args, kwargs) from error
        return function(*args, **kwargs)

    def _alias(self):
        with torch._C.DisableTorchFunctionSubclass():
            memory = _one_element_tensor(
                self.untyped_storage(), self.shape, self.dtype, self.device
            )
            alias = T._make_subclass(LogitsPlaceholder, memory)
        return alias if self._head_call is None else self._derive(alias)

    def __tensor_flatten__(self):
        """Refuse: torch.compile asks for it where a compiled function is given logits."""
        raise self._cannot_follow("a compiled function")

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        raise NotImplementedError

    def _cannot_follow(self, consumer) -> BaseException:
        """Return what to raise where a use of the logits is not seen, or gets into no graph."""
        request = self._head_call.request
        if request.closed:
            return RuntimeError(
                f"liger-kernel: {consumer} is given logits of a training step that is over; call "
                "the patched model with skip_logits=False"
            )
        return request.needs_logits(f"{consumer} takes its logits")

    def _set_logits(self, logits):
        """Keep the real logits: those of the head, with what was recorded done to them."""
        with torch._C.DisableTorchFunctionSubclass():
            requires_grad = self.requires_grad
        with torch.set_grad_enabled(requires_grad):
            for function, args in self._recorded:
                logits = function(*(logits if arg is None else arg for arg in args))
        detached = not requires_grad and logits.requires_grad
        self._logits = logits.detach() if detached else logits

    def materialize(self) -> torch.Tensor:
        """Return the real logits. Raises `LogitsNeeded` where they come too late."""
        if self._is_hidden_from_graph() and _in_autograd_function():
            raise self._cannot_follow("an autograd Function")
        if self._logits is None:
            head_call = self._head_call
            if _is_being_called(head_call.head):
                raise head_call.request.needs_logits("a hook of its head reads its logits")
            head_call.make_logits()
        return self._logits

    def _is_hidden_from_graph(self) -> bool:
        """Return True under no_grad or in an autograd Function.

        Nothing that is done there gets into the graph.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self.requires_grad and not torch.is_grad_enabled()

    def take_loss(self, value):
        """Return the loss that was computed in the head, as a function of this placeholder.

        Its gradient takes the way through the placeholder, where the hooks of the head are.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return _LossOfPlaceholder.apply(self, value.detach().to(self.device))


def _register(placeholder, head_call, dtype, transform, recorded) -> LogitsPlaceholder:
    placeholder._head_call = head_call
    placeholder._dtype = dtype
    placeholder._transform = transform
    placeholder._recorded = recorded
    placeholder._logits = None
    head_call.request.placeholders.append(weakref.ref(placeholder))
    return placeholder


def _materialize(x):
    return x.materialize() if type(x) is LogitsPlaceholder else x


def _logits_below_autograd(x):
    """Return logits for a placeholder where autograd has been passed already."""
    if type(x) is not LogitsPlaceholder:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        if x._logits is None or x.requires_grad:
            raise x._cannot_follow("TorchScript, vmap or C++ code")
    return x._logits


def _refuse_if_loss_taken(x):
    """Raise if gradients of logits are asked for whose loss was taken.

    The loss's gradient does not pass through real logits.
    """
    if type(x) is LogitsPlaceholder:
        head_call = x._head_call
        if head_call.loss_taken and not head_call.request.closed:
            raise head_call.request.needs_logits("its forward wants gradients of its logits")
    return x


def _restart_or_error(error, args, kwargs) -> BaseException:
    """Return what to raise where the placeholder's own code has failed in a torch function."""
    placeholders = [x for x in tree_leaves((args, kwargs)) if type(x) is LogitsPlaceholder]
    head_calls = [placeholder._head_call for placeholder in placeholders]
    requests = {head_call.request for head_call in head_calls if head_call is not None}
    failures = [request.failure(error) for request in requests]
    return failures[0] if failures else error


def _destination(function, args, kwargs):
    """Return the device and the dtype that `Tensor.to`, ``cuda`` or ``cpu`` ask for.

    They are None where it stays as it is. Raises TypeError for other arguments.
    """
    if function is T.to:
        if args and isinstance(args[0], T):
            return args[0].device, args[0].dtype
        return torch._C._nn._parse_to(*args, **kwargs)[:2]
    if args or kwargs:
        raise TypeError
    if function is T.cpu:
        return torch.device("cpu"), None
    return torch.device("cuda", torch.cuda.current_device()), None


def _is_same_device(a, b) -> bool:
    return (a.type, a.index or 0) == (b.type, b.index or 0)


# ---- who is asking ----

PACKAGE = __name__.partition(".")[0] + "."
# whose hooks and autograd Functions look at no values
LIBRARIES = (
    "torch.distributed.",
    "torch.utils.",
    "deepspeed.",
    "accelerate.",
    "peft.",
    "transformers.",
)


def is_library_code(hook) -> bool:
    """Return True for a hook, or an autograd Function, of `LIBRARIES`: it looks at no values."""
    hook = getattr(hook, "func", hook)  # of a functools.partial
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith(LIBRARIES)


def _is_below_autograd() -> bool:
    """Return True where autograd has been passed already, as a ``TorchDispatchMode`` finds it.

    Nothing that is done there gets into a graph.
    """
    key = torch._C.DispatchKey.AutogradFunctionality
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    return excluded and not torch.is_inference_mode_enabled()


def _in_autograd_function() -> bool:
    """Return True while the forward of an autograd Function is running.

    It turns forward-mode gradients off, which no_grad does not.
    """
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def _caller_frames():
    """Iterate over the frames of the callers, from the innermost."""
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _first_argument(frame):
    names = frame.f_code.co_varnames[:1]
    return frame.f_locals.get(*names) if names else None


def _in_library_function() -> bool:
    """Return True if the autograd Function whose forward is running is a library's.

    DeepSpeed's only detaches. A Function is known by its ctx; one whose forward has none
    (``setup_context``), by the file of the code that takes the logits.
    """
    for frame in _caller_frames():
        function = getattr(type(_first_argument(frame)), "_forward_cls", None)
        if function is not None:
            return is_library_code(function)
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", PACKAGE)):
            return module.startswith(LIBRARIES)
    return False


def _is_being_called(module) -> bool:
    """Return True while ``module(...)`` is running, which includes its hooks."""
    call = torch.nn.Module._call_impl.__code__
    return any(
        frame.f_code is call and _first_argument(frame) is module for frame in _caller_frames()
    )
