"""Hooks on a module whose work is done by our code elsewhere. They must still see its inputs and
outputs.

DeepSpeed's ZeRO-3 has hooks on every module, to gather its parameters. For a module without
parameters they do nothing, so it need not be called for their sake."""

from __future__ import annotations

from torch.nn.modules import module as _modules

HOOK_ATTRIBUTES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
# Modules that define ZeRO-3's hooks. The second wraps those of the first.
ZERO3_MODULES = "deepspeed.runtime.zero.parameter_offload", "deepspeed.utils.nvtx"


def has_hooks(*modules, still_called=True) -> bool:
    """Return True if there are hooks to respect on these modules, or global ones.

    ``still_called``: False if the modules are not called any more. Then ZeRO-3's hooks that gather
    nothing do not count."""
    for m in modules:
        if m._forward_pre_hooks or m._forward_hooks or m._backward_pre_hooks or m._backward_hooks:
            if still_called or not has_only_idle_zero3_hooks(m):
                return True
    return _modules._has_any_global_hook()


def has_hooks_within(module) -> bool:
    """Return True if there are hooks to respect on a module that is not called any more, or on one
    below it."""
    if has_hooks(module, still_called=False):
        return True
    for child in module._modules.values():
        if child is not None and has_hooks_within(child):
            return True
    return False


def has_only_idle_zero3_hooks(module) -> bool:
    """Return True if all its hooks are ZeRO-3's, and it has no parameters for them to gather."""
    for name in HOOK_ATTRIBUTES:
        for hook in getattr(module, name).values():
            if getattr(hook, "__module__", None) not in ZERO3_MODULES:
                return False
    return next(iter(module.parameters()), None) is None


def without_hooks(module) -> dict:
    """Return attributes that remove idle ZeRO-3 hooks from a copy of the module.

    Those hooks would note that the copy was called."""
    has_any = any(getattr(module, name) for name in HOOK_ATTRIBUTES)
    if has_any and has_only_idle_zero3_hooks(module):
        return {name: {} for name in HOOK_ATTRIBUTES}
    return {}
