"""Private subclasses: how a module is patched.

A patched module is of a subclass of its own class: same name, same state, another ``forward``. So isinstance,
state-dict keys, deepcopy, pickle, hooks, DataParallel replicas and FSDP keep working, one patched model changes no
other, and the class can be given back. No weight is read, none is added or renamed.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
from types import MethodType

import torch

from liger_kernel.ops import functional
from liger_kernel.ops.mlp import glu
from liger_kernel.patch import deferred, loss_in_head, probe
from liger_kernel.patch.deferred import Normed, Stream, hooked, plain, seen, shared, tensor_of
from liger_kernel.patch.kinds import GLU, Block, CausalLM, Experts, HeadNorm, LayerNorm, Norm, Rope
from liger_kernel.patch.logits import current
from liger_kernel.patch.parts import unchanged

ROPE = "apply_rotary_pos_emb"


def subclass(cls: type, what, parts=()) -> type:
    """The subclass of ``cls`` whose forward is ours. One for each proof, so that modules share it."""
    name = probe.GATE if isinstance(what, Experts) else "forward"
    return _subclass(cls, what, parts, name, getattr(cls, name), probe.used_by(getattr(cls, name)))


@functools.cache
def _subclass(cls, what, parts, name, family, used):
    members = {"_liger": (cls, what), "_liger_parts": parts, "_liger_state": {}, **_MEMBERS[type(what)](cls, what)}
    if not isinstance(what, CausalLM):
        members[name] = _guarded(cls, what, members[name], parts, name, family, probe.same_globals(used))
    names = dict(__module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__, __reduce_ex__=_reduce)
    return type(cls)(cls.__name__, (cls,), {**names, **members, **members["_liger_state"]})


def _reduce(self, protocol):
    """Pickled as (the family's class, what was proved of it); deepcopy comes by here, too."""
    made, args, *state = self._liger[0].__reduce_ex__(self, max(protocol, 2))
    if made is not copyreg.__newobj__ or "_liger" not in vars(type(self)):  # another library's subclass of ours
        return (made, args, *state)
    return (_rebuilt, (*self._liger, self._liger_parts), *state)


def _rebuilt(cls, what, parts=()):
    return cls.__new__(subclass(cls, what, parts))


def _guarded(cls, what, ours, parts, name, family, same):
    """``ours`` with the signature of ``family``, while module, class and globals are what was proved; then the class's
    own."""

    def of_one(self, x):
        if getattr(cls, name) is family and (same is None or same()) and unchanged(self, parts):
            return ours(self, x)
        return getattr(cls, name)(self, tensor_of(x))

    def of_many(self, *args, **kwargs):
        if getattr(cls, name) is family and (same is None or same()) and unchanged(self, parts):
            return ours(self, *args, **kwargs)
        return getattr(cls, name)(self, *args, **kwargs)

    if isinstance(what, (Block, Rope)):
        return probe.named_as(family, of_many)
    _, parameter = inspect.signature(family).parameters.values()
    code = of_one.__code__.replace(co_varnames=("self", parameter.name))  # it may be given by keyword
    defaults = None if parameter.default is parameter.empty else (parameter.default,)
    return probe.named_as(family, types.FunctionType(code, globals(), name, defaults, of_one.__closure__))


FLOATS = torch.float32, torch.bfloat16, torch.float16


def _eps(module, what):
    return getattr(module, what.eps) if isinstance(what.eps, str) else what.eps


def _fits(x, eps, parameters, mixed=False) -> bool:
    """Whether the operator does with these what the family's norm does; ``mixed``: of any dtypes, and in autocast."""
    if not plain(x) or x.dtype not in FLOATS or x.dim() == 0 or (not mixed and deferred.in_autocast(x)):
        return False
    for p in parameters:
        if p is None or not plain(p) or p.shape != x.shape[-1:] or p.dtype not in (FLOATS if mixed else (x.dtype,)):
            return False
    return isinstance(eps, (int, float)) and eps >= 0 and deferred.steady(x)


def _norm_members(cls, what):
    waits, what = (True, what.norm) if isinstance(what, HeadNorm) else (False, what)

    def forward(self, hidden_states):
        x, eps = hidden_states.value if type(hidden_states) is Stream else hidden_states, _eps(self, what)
        weight = self.weight if what.weight else None
        if not _fits(x, eps, [weight] if what.weight else [], what.mixed):
            return cls.forward(self, tensor_of(hidden_states))
        # in some families rounding to x's dtype comes before the weight, whose dtype then counts
        apart = weight is not None and weight.dtype != x.dtype and what.casting == "llama"
        how = None if apart else weight, eps, what.offset, what.casting
        if type(hidden_states) is Stream:
            y = hidden_states.normed(*how)
        elif waits and not apart and not seen(self) and deferred.may_wait(self):
            return Normed(x, how)
        else:
            y = functional.liger_rms_norm(x, *how)
        return (weight + what.offset if what.offset else weight) * y if apart else y

    return {"forward": forward}


def _layer_norm_members(cls, what):
    def forward(self, hidden_states):
        weight, bias, eps = self.weight if what.weight else None, self.bias if what.bias else None, _eps(self, what)
        held = [p for p, wanted in ((weight, what.weight), (bias, what.bias)) if wanted]
        if not _fits(hidden_states, eps, held):
            return cls.forward(self, hidden_states)
        return functional.liger_layer_norm(hidden_states, weight, bias, eps)

    return {"forward": forward}


def _block_members(cls, what):
    def forward(self, *args, **kwargs):
        stream, *others = args or (kwargs[what.stream],)
        if not plain(stream) or not deferred.worth_fusing(stream) or seen(*self._modules.values()):
            return cls.forward(self, *args, **kwargs)
        if args:
            args = Stream(stream), *others
        else:
            kwargs[what.stream] = Stream(stream)
        out = cls.forward(self, *args, **kwargs)
        return tuple(map(tensor_of, out)) if type(out) is tuple else tensor_of(out)

    return {"forward": forward}


def _glu_members(cls, what):
    projections = what.gate, what.up, what.down

    # The projections are called, all three: they may be quantised, sharded, or carry a LoRA.
    def forward(self, x):
        if hooked(*(m for name, m in self._modules.items() if name not in projections)):  # the activation is called
            return cls.forward(self, x)
        gate, up = getattr(self, what.gate), getattr(self, what.up)
        if what.gate == what.up:
            a, b = gate(x).chunk(2, dim=-1)
        else:
            x = shared(x, (gate, up))
            a, b = gate(x), up(x)
        return glu.gated_linear(a, b, what.act, getattr(self, what.down))

    return {"forward": forward}


def _experts_members(cls, what):
    def _apply_gate(self, gate_up):
        if not plain(gate_up):
            return cls._apply_gate(self, gate_up)
        a, b = gate_up.chunk(2, dim=-1)
        return functional.liger_swiglu(a, b) if what.act == "silu" else functional.liger_geglu(a, b, what.act)

    return {probe.GATE: _apply_gate}


def _rotates_alike(heads, cos, sin, unsqueeze_dim) -> bool:
    """Whether the operator rotates these as the family does. In autocast what reads them is given its dtype anyway."""
    given = [x.x if type(x) is Normed else x for x in heads]
    if not plain(*given, cos, sin) or unsqueeze_dim not in (1, 2) or any(x.dtype not in FLOATS for x in given):
        return False
    return deferred.in_autocast(cos) or all(x.dtype == cos.dtype == sin.dtype for x in given)


def _rope_members(cls, what):
    family = probe.global_of(cls.forward, ROPE)

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        if not _rotates_alike((q, k), cos, sin, unsqueeze_dim):
            return family(tensor_of(q), tensor_of(k), cos, sin, unsqueeze_dim=unsqueeze_dim)
        return deferred.rope(q, k, cos, sin, unsqueeze_dim, what.interleaved)

    def of_one(x, cos, sin, unsqueeze_dim=1):
        if not _rotates_alike((x,), cos, sin, unsqueeze_dim):
            return family(tensor_of(x), cos, sin, unsqueeze_dim=unsqueeze_dim)
        return deferred.rope_of_one(x, cos, sin, unsqueeze_dim, what.interleaved)

    rebound = probe.rebind(cls.forward, ROPE, of_one if what.one else apply_rotary_pos_emb)
    name = list(inspect.signature(cls.forward).parameters)[1]

    def forward(self, *args, **kwargs):
        layers = (m for m in self._modules.values() if not isinstance(known_as(m), (Norm, HeadNorm)))
        if args:
            args = shared(args[0], layers), *args[1:]
        else:
            kwargs[name] = shared(kwargs[name], layers)
        if torch.compiler.is_compiling():
            return rebound(self, *args, **kwargs)
        before = deferred.rotating(self)
        try:
            return rebound(self, *args, **kwargs)
        finally:
            deferred.rotating(before)

    return {"forward": forward}


def _model_members(cls, what):
    def loss_function(self):
        request = current()
        asked = request is not None and request.model is self
        return request.loss_function if asked else self._liger_family_loss()

    return {
        "forward": loss_in_head.fused_forward(cls),
        "loss_function": property(loss_function, cls.loss_function.fset),
        "_liger_family_loss": loss_in_head.family_loss(cls),
        "_liger_state": {
            "_liger_learned": None,  # what to expect of the next step: `loss_in_head`
            "_liger_logits_needed": None,  # the hooks with which it gets real logits
            "_liger_told": None,  # why there are logits in training
        },
    }


_MEMBERS = {
    Norm: _norm_members,
    LayerNorm: _layer_norm_members,
    GLU: _glu_members,
    Experts: _experts_members,
    Rope: _rope_members,
    Block: _block_members,
    HeadNorm: _norm_members,
    CausalLM: _model_members,
}


def become(module: torch.nn.Module, what, parts=()) -> None:
    """``what`` is what the module's class was proved to be, by those of its parts."""
    swap(module, subclass(type(module), what, parts))
    module.__dict__.update(type(module)._liger_state)  # the class has it, too: torch.compile guards on who has a name


def swap(module: torch.nn.Module, new: type) -> None:
    old = type(module)
    for name in ("forward", "_old_forward"):  # accelerate's hooks keep the bound method on the module
        method = module.__dict__.get(name)
        if isinstance(method, MethodType) and method.__func__ is old.forward:
            module.__dict__[name] = MethodType(new.forward, module)
    module.__class__ = new


def known_as(module):
    """What a patched module's class was proved to be."""
    return getattr(type(module), "_liger", (None, None))[1]


def own_forward(module) -> bool:
    """Whether calling the module runs something else than its class's forward, which a new class would not change."""
    called = module.__dict__.get("_old_forward") or module.__dict__.get("forward")
    return called is not None and getattr(called, "__func__", None) is not type(module).forward
