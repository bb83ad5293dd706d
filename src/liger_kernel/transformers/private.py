"""Private subclasses: how a module is patched.

A patched module is of a subclass of its own class: same name, same state, another ``forward``. So isinstance,
state-dict keys, deepcopy, pickle, hooks, DataParallel replicas and FSDP keep working, one patched model changes no
other, and the class can be given back. No weight is read, none is added or renamed.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from types import MethodType

import torch

from liger_kernel.ops import glu
from liger_kernel.transformers import causal_lm, deferred, functional, probe
from liger_kernel.transformers.deferred import Normed, Stream, hooked, plain, seen, shared, tensor_of
from liger_kernel.transformers.kinds import GLU, Block, CausalLM, Experts, Head, HeadNorm, LayerNorm, Norm, Rope

ROPE = "apply_rotary_pos_emb"


@functools.cache
def subclass(cls: type, what) -> type:
    """The subclass of ``cls`` whose forward is ours. One for each pair, so that modules share it."""
    members = {"_liger": (cls, what), "_liger_state": {}, **_MEMBERS[type(what)](cls, what)}
    names = dict(__module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__, __reduce_ex__=_reduce)
    return type(cls)(cls.__name__, (cls,), {**names, **members, **members["_liger_state"]})


def _reduce(self, protocol):
    """Pickled as (the family's class, what was proved of it); deepcopy comes by here, too."""
    cls, what = self._liger
    made, args, *state = cls.__reduce_ex__(self, max(protocol, 2))
    if made is not copyreg.__newobj__ or args != (subclass(cls, what),):  # another library's subclass of ours
        return (made, args, *state)
    return (_rebuilt, (cls, what), *state)


def _rebuilt(cls, what):
    return cls.__new__(subclass(cls, what))


def _eps(module, what):
    return getattr(module, what.eps) if isinstance(what.eps, str) else what.eps


def _norm_members(cls, what):
    waits, what = (True, what.norm) if isinstance(what, HeadNorm) else (False, what)

    def forward(self, hidden_states):
        weight = self.weight if what.weight else None
        how = _eps(self, what), what.offset, what.casting
        if type(hidden_states) is Stream and plain(weight):
            return hidden_states.normed(weight, *how)
        if not plain(hidden_states, weight):
            return cls.forward(self, tensor_of(hidden_states))
        if waits and not seen(self):
            return Normed(hidden_states, (weight, *how))
        return functional.liger_rms_norm(hidden_states, weight, *how)

    return {"forward": forward}


def _layer_norm_members(cls, what):
    def forward(self, hidden_states):
        weight, bias = self.weight if what.weight else None, self.bias if what.bias else None
        if not plain(hidden_states, weight, bias) or torch.is_autocast_enabled(hidden_states.device.type):
            return cls.forward(self, tensor_of(hidden_states))
        return functional.liger_layer_norm(hidden_states, weight, bias, _eps(self, what))

    return {"forward": forward}


def _block_members(cls, what):
    def forward(self, *args, **kwargs):
        stream, *others = args or (kwargs[what.stream],)
        if not plain(stream) or not deferred.pays(stream) or seen(*self._modules.values()):
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
        if gate is up:
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


def _rope_members(cls, what):
    family = probe.global_of(cls.forward, ROPE)

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        known = plain(cos, sin) and all(type(x) is Normed or plain(x) for x in (q, k))
        if not known or unsqueeze_dim not in (1, 2):
            return family(tensor_of(q), tensor_of(k), cos, sin, unsqueeze_dim=unsqueeze_dim)
        return deferred.rope(q, k, cos, sin, unsqueeze_dim, what.interleaved)

    def of_one(x, cos, sin, unsqueeze_dim=1):
        if not plain(x, cos, sin) or unsqueeze_dim not in (1, 2):
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
        return rebound(self, *args, **kwargs)

    return {"forward": forward}


def _head_members(cls, what):
    def forward(self, hidden_states, *args, **kwargs):
        request = self._liger_request
        if request is None or args or kwargs:
            return cls.forward(self, hidden_states, *args, **kwargs)
        return request.of_head(self, cls.forward, hidden_states)

    return {"forward": forward, "_liger_state": {"_liger_request": None}}


def _model_members(cls, what):
    def loss_function(self):
        request = self._liger_request
        return self._liger_family_loss() if request is None else request.loss_function

    return {
        "forward": causal_lm.fused_forward(cls.forward, prepare_head),
        "loss_function": property(loss_function, cls.loss_function.fset),
        "_liger_family_loss": cls.loss_function.fget,
        "_liger_state": {
            "_liger_request": None,
            "_liger_proved": None,  # what the first step's proof rests on, and the tail that it has shown
            "_liger_unfusable": None,  # why it gets real logits
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
    Head: _head_members,
    CausalLM: _model_members,
}


def become(module: torch.nn.Module, what) -> None:
    """``what`` is what the module's class was proved to be."""
    swap(module, subclass(type(module), what))
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


def prepare_head(head) -> None:
    """Heads are replaced after the patch, too: by resize_token_embeddings, by PEFT, by the user."""
    for leaf in causal_lm.leaves(head):
        if not isinstance(known_as(leaf), Head) and gives_logits(leaf) and not own_forward(leaf):
            become(leaf, Head())


def gives_logits(leaf) -> bool:
    return isinstance(leaf, torch.nn.Module) and hasattr(leaf, "out_features")
