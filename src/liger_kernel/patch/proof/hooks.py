"""Hooks on a module whose work is done by other code of ours: they see what it is given and gives.

DeepSpeed's ZeRO-3 has hooks on every module, to gather its parameters. A module without parameters
need not be called for their sake."""

from __future__ import annotations

from torch.nn.modules import module as _modules

HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
GATHERING = (
    "deepspeed.runtime.zero.parameter_offload",
    "deepspeed.utils.nvtx",
)  # the second wraps those of the first


def hooked(*modules, called=True) -> bool:
    """Whether there are hooks to respect. ``called``: whether the modules are called all the
    same."""
    for m in modules:
        if m._forward_pre_hooks or m._forward_hooks or m._backward_pre_hooks or m._backward_hooks:
            if called or not gathers_nothing(m):
                return True
    return _modules._has_any_global_hook()


def gathers_nothing(module) -> bool:
    """Whether its hooks are ZeRO-3's alone, and it has no parameters."""
    for name in HOOKS:
        for hook in getattr(module, name).values():
            if getattr(hook, "__module__", None) not in GATHERING:
                return False
    return next(iter(module.parameters()), None) is None


def without(module) -> dict:
    """Attributes for a copy of it which is tried: without the hooks that would write down that it
    was."""
    has = any(getattr(module, name) for name in HOOKS)
    return {name: {} for name in HOOKS} if has and gathers_nothing(module) else {}
