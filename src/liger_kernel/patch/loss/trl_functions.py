"""TRL's autograd Functions: what stands for one of them, how it is proved, put in and taken out.

TRL reads such a Function as a global of a module at each call of ``apply``. So an object with an
``apply`` of its own is put there (`Seam`), once it has given what the Function gives.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from liger_kernel.core import devices
from liger_kernel.patch.proof import purity
from liger_kernel.patch.proof.probe import error_summary, isolated, noise

MODULE = "trl.trainer.utils"  # all trainers import it
TRIED_SIZES = 7, 8, 40  # tokens, hidden channels, classes
OUTPUT_ERROR = 1e-4  # of logits up to 10 in size, which are exact
GRADIENT_ERROR = 5e-3  # of the largest: products may be in TF32


class StandIn:
    """Stands for a Function of TRL, and runs ours as long as the Function is what was proved.

    All else is the Function's: what it is copied or pickled as, what a subclass of it is a subclass
    of, and what is set on it. A subclass has ``run(arguments)``, which returns None for what ours
    does not take.
    """

    def __init__(self, original):
        vars(self)["original"] = original

    def __getattr__(self, name):
        if name == "original":  # of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.original, name)

    def __setattr__(self, name, value):
        setattr(self.original, name, value)

    def __delattr__(self, name):
        delattr(self.original, name)

    def __mro_entries__(self, bases):
        return (self.original,)

    def apply(self, *args):
        is_as_proved = _proved.get(self.original) == _methods(self.original)
        outputs = self.run(args) if is_as_proved else None
        return self.original.apply(*args) if outputs is None else outputs


_proved = {}  # Functions that ours was found to equal -> their methods then


def _methods(function) -> tuple:
    """Return what a Function computes by. Since PyTorch 2.14 ``apply`` is built in."""
    apply = function.apply
    return function.forward, function.backward, getattr(apply, "__func__", apply)


def _is_trls_own(function) -> bool:
    """Return True if a Function, its methods and its ``apply`` are code of TRL and PyTorch."""
    apply = inspect.getattr_static(function, "apply")
    # of one that is built in, the class in C that it belongs to
    code_of_apply = getattr(apply, "__func__", None) or getattr(apply, "__objclass__", apply)
    parts = function, function.forward, function.backward, code_of_apply
    return all(map(purity.is_released_code, parts))


def are_plain(*tensors) -> bool:
    """Return True if our kernels take these tensors (None for none) as they are: no subclass, one
    device, 16 or 32 bits; and if nothing watches PyTorch's own functions."""
    tensors = [x for x in tensors if x is not None]
    first = tensors[0]
    return (
        all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors)
        and all(x.device == first.device and x.layout == torch.strided for x in tensors)
        and all(x.dtype in (torch.float32, torch.bfloat16, torch.float16) for x in tensors)
        and devices.has_kernels(first)
        and not devices.in_func_transform()
        and not devices.in_user_mode()
    )


# ---- the proof ----


def training_device():
    """Return the current accelerator if it has kernels, the CPU if that has, or None."""
    candidates = [torch.device("cpu")]
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator().type
        candidates.insert(0, torch.device(accelerator, torch.accelerator.current_device_index()))
    for device in candidates:
        if devices.has_kernels(torch.empty(0, device=device)):
            return device
    return None


def exact_inputs(*shapes):
    """Return random multiples of 1/8 up to 2, whose products are the same in any precision and
    order."""
    return [
        (noise(*shape, seed=seed) * 8).round().clamp(-16, 16) / 8
        for seed, shape in enumerate(shapes)
    ]


def as_leaf(x, device):
    """Return a leaf on the device, marked as whole for the gather of TRL's backward under ZeRO-3.

    None stays None.
    """
    if x is None:
        return None
    leaf = x.clone().to(device).requires_grad_()
    zero = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if zero is not None:
        leaf.ds_status = zero.ZeroParamStatus.AVAILABLE
    return leaf


def differences(function, ours, tensors: dict, arguments, names, grads) -> str | None:
    """Run the Function and ours; return how outputs or gradients differ, by name, or None.

    Args:
        ours: takes what the Function's ``apply`` takes.
        tensors: the first arguments, of which gradients are compared, by name. None stays None.
        arguments: the other ones, on the device of the trial.
        names: of the outputs.
        grads: of the first outputs, on the device of the trial.
    """
    results = []
    for apply in (function.apply, ours):
        leaves = {name: as_leaf(x, grads[0].device) for name, x in tensors.items()}
        with torch.enable_grad(), torch.autocast(grads[0].device.type, enabled=False):
            outputs = apply(*leaves.values(), *arguments)
            torch.autograd.backward(outputs[: len(grads)], grads)
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf is not None}
        results.append((dict(zip(names, outputs, strict=True)), gradients))
    (theirs, their_grads), (our_outputs, our_grads) = results
    for name, expected in theirs.items():
        difference = (our_outputs[name].detach().float() - expected.detach().float()).abs().max()
        if not difference <= OUTPUT_ERROR:
            return f"its {name} differ by {difference:.2g}"
    for name, expected in their_grads.items():
        if expected is None and our_grads[name] is None:
            continue
        if expected is None or our_grads[name] is None:
            return f"its gradient of {name} is there or not"
        difference = (our_grads[name] - expected).abs().max() / expected.abs().max()
        if not difference <= GRADIENT_ERROR:
            return f"its gradient of {name} differs by {difference:.2g} of the largest"
    return None


# ---- putting it in, and out ----


@dataclass(frozen=True)
class Seam:
    """A Function of TRL that ours may replace.

    name, kernel: what is replaced and by what, in the words of a report.
    stand_in: the class of what is put in.
    places: the globals that hold the Function, as (module, name). The module of the first one is
        imported if there is one. That of another is TRL's to import.
    arguments: what TRL's Function is called with, by name.
    try_on: runs a Function and ours on a device, on a few tokens; returns how they differ, or None.
    """

    name: str
    kernel: str
    stand_in: type[StandIn]
    places: tuple[tuple[str, str], ...]
    arguments: tuple[str, ...]
    try_on: Callable[[object, torch.device], str | None]

    def exists(self) -> bool:
        """Return True if this TRL has the module of the Function."""
        try:
            importlib.import_module(self.places[0][0])
        except ImportError:
            return False
        return True

    def is_loaded(self) -> bool:
        """Return True if all modules of the places are imported: the trainer is, too."""
        return all(module in sys.modules for module, _ in self.places)

    def current(self):
        """Return what stands in the first place now; None where nothing does."""
        module, name = self.places[0]
        return getattr(sys.modules.get(module), name, None)

    def is_in(self) -> bool:
        return isinstance(self.current(), self.stand_in)

    def reason_left_alone(self, function) -> str | None:
        """Return why TRL's Function is left alone, or None where ours gives what it gives."""
        if function is None:
            return "this TRL has none"
        try:
            methods = _methods(function)
            if _proved.get(function) == methods:
                return None
            if not _is_trls_own(function):
                return "it is not TRL's own"
            arguments = list(inspect.signature(function.forward).parameters)[1:]
            if arguments != list(self.arguments):
                known = "its arguments are not those of TRL 1.15 and 1.16, but"
                return f"{known} {', '.join(arguments)}"
            device = training_device()
            if device is None:
                return "there is no device with kernels"
            with isolated():
                reason = self.try_on(function, device)
        except Exception as error:
            return f"it could not be tried: {error_summary(error)}"
        if reason is None:
            _proved[function] = methods
        return reason

    def put_in(self) -> str | None:
        """Put ours in all places. Returns why not, or None."""
        function = self.current()
        stand_in = function
        if not self.is_in():
            reason = self.reason_left_alone(function)
            if reason is not None:
                return reason
            stand_in = self.stand_in(function)
        for module, name in self.places:
            # elsewhere may be something that a user has put there
            if getattr(sys.modules.get(module), name, None) is stand_in.original:
                setattr(sys.modules[module], name, stand_in)
        return None

    def take_out(self) -> None:
        """Put TRL's Function back."""
        for module, name in self.places:
            stand_in = getattr(sys.modules.get(module), name, None)
            if isinstance(stand_in, self.stand_in):
                setattr(sys.modules[module], name, stand_in.original)
