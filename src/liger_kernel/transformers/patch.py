"""Replacing what is proved equal, in one model or in every model of a family that is built from now on.

A module is patched by giving it a private subclass of its own class (`private`): same name, same state, another
``forward``. So isinstance, state-dict keys, deepcopy, pickle, hooks, DataParallel replicas and FSDP keep working, one
patched model changes no other, and `revert` gives the class back. No weight is read, none is added or renamed.

The class level is the same thing at birth: the family's models patch themselves at the end of ``__init__``. Models that
exist already, and everything in the modeling module, stay as they are.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import inspect
import logging
import sys
from collections import Counter
from dataclasses import dataclass, field
from types import MethodType

import torch

from liger_kernel.ops import glu
from liger_kernel.transformers import causal_lm, functional, probe

logger = logging.getLogger(__name__)
ROPE = "apply_rotary_pos_emb"
GATED = {"swiglu": ("silu",), "geglu": ("gelu (tanh)", "gelu")}  # flag -> activations
FLAGS = ("rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", "swiglu", "geglu")


# ---- the report ----


@dataclass
class Report:
    """What was replaced by what, how many modules, and what was left alone, why."""

    target: str
    replaced: Counter = field(default_factory=Counter)  # (what, by what) -> modules
    left_alone: Counter = field(default_factory=Counter)  # (what, why) -> modules
    warnings: list[str] = field(default_factory=list)

    def __str__(self):
        lines = [f"{self.target}, patched by liger-kernel:"]
        rows = [("replaced", "by", "modules")] + [(*k, str(n)) for k, n in self.replaced.items()]
        if self.left_alone:
            rows += [("left alone", "why", "modules")] + [(*k, str(n)) for k, n in self.left_alone.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines += [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>7}".rstrip() for a, b, c in rows]
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])

    def of(self, what: str) -> int:
        """How many modules of the class (or function) named ``what`` were replaced."""
        return sum(n for (name, _), n in self.replaced.items() if name == what)


# ---- private subclasses ----


@dataclass(frozen=True)
class Head:
    """A module that gives logits: the loss in their place where `causal_lm` asks for it."""


@dataclass(frozen=True)
class CausalLM:
    """A model with a head and a loss function: `causal_lm.fused_forward`."""


@functools.cache
def private(cls: type, what) -> type:
    """The subclass of ``cls`` whose forward is ours. One for each pair, so that modules share it."""
    members = _MEMBERS[type(what)](cls, what)
    names = dict(__module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__)
    return type(cls)(cls.__name__, (cls,), {**names, "__reduce_ex__": _reduce, "_liger": (cls, what), "_liger_state": {}, **members})


def _reduce(self, protocol):
    """Pickled as (the family's class, what was proved of it); deepcopy comes by here, too."""
    cls, what = self._liger
    made, args, *state = cls.__reduce_ex__(self, max(protocol, 2))
    if made is not copyreg.__newobj__ or args != (private(cls, what),):  # another library's subclass of ours
        return (made, args, *state)
    return (_rebuilt, (cls, what), *state)


def _rebuilt(cls, what):
    return cls.__new__(private(cls, what))


def _norm_members(cls, what):
    def forward(self, hidden_states):
        weight = self.weight if what.weight else None
        if not causal_lm.plain(hidden_states, weight):
            return cls.forward(self, hidden_states)
        return functional.liger_rms_norm(hidden_states, weight, getattr(self, what.eps), what.offset, what.casting)

    return {"forward": forward}


def _glu_members(cls, what):
    act = {"silu": "silu", "gelu (tanh)": "tanh", "gelu": "none"}[what.act]

    # The projections are called, all three: they may be quantised, sharded, or carry a LoRA.
    def forward(self, x):
        if what.gate == what.up:
            a, b = getattr(self, what.gate)(x).chunk(2, dim=-1)
        else:
            a, b = getattr(self, what.gate)(x), getattr(self, what.up)(x)
        return glu.gated_linear(a, b, act, getattr(self, what.down))

    return {"forward": forward}


def _rope_members(cls, what):
    family = probe.global_of(cls.forward, ROPE)

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        if not causal_lm.plain(q, k, cos, sin):
            return family(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return functional.liger_rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, interleaved=what.interleaved)

    return {"forward": probe.rebind(cls.forward, ROPE, apply_rotary_pos_emb)}


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
            "_liger_proved": None,  # the tail that the first step has shown
            "_liger_unfusable": None,  # why it gets real logits
        },
    }


_MEMBERS = {
    probe.Norm: _norm_members,
    probe.GLU: _glu_members,
    probe.Rope: _rope_members,
    Head: _head_members,
    CausalLM: _model_members,
}


# ---- one model ----


def become(module: torch.nn.Module, what) -> None:
    """``what`` is what the module's class was proved to be."""
    swap(module, private(type(module), what))
    module.__dict__.update(type(module)._liger_state)  # on the instance: torch.compile guards on which names are there


def swap(module: torch.nn.Module, new: type) -> None:
    old = type(module)
    for name in ("forward", "_old_forward"):  # accelerate's hooks keep the bound method on the module
        method = module.__dict__.get(name)
        if isinstance(method, MethodType) and method.__func__ is old.forward:
            module.__dict__[name] = MethodType(new.forward, module)
    module.__class__ = new


def _own_forward(module) -> bool:
    """Whether calling the module runs something else than its class's forward, which a new class would not change."""
    called = module.__dict__.get("_old_forward") or module.__dict__.get("forward")
    return called is not None and getattr(called, "__func__", None) is not type(module).forward


def prepare_head(head) -> None:
    """Heads are replaced after the patch, too: by resize_token_embeddings, by PEFT, by the user."""
    for leaf in causal_lm.leaves(head):
        if not hasattr(leaf, "_liger_request") and _gives_logits(leaf) and not _own_forward(leaf):
            become(leaf, Head())


def _gives_logits(leaf) -> bool:
    return isinstance(leaf, torch.nn.Module) and hasattr(leaf, "out_features")


class _Patcher:
    def __init__(self, model, flags):
        self.model, self.flags = model, flags
        self.models = causal_lms(model)
        self.report = Report(type(self.models[0] if self.models else model).__name__)
        self.found = Counter()  # flag -> modules, those of earlier calls too
        self.proofs = {}
        self.rotary = [m for m in model.modules() if "rotary" in type(m).__name__.lower() and m._buffers]

    def run(self) -> Report:
        for module in list(self.model.modules()):
            flag, by = self.known(module)
            if flag is None:
                flag, what = self.recognised(module)
                if flag is None:
                    continue
                if isinstance(what, str):
                    self.report.left_alone[type(module).__name__, what] += 1
                    continue
                by = _name_of(what)
                become(module, what)
                self.report.replaced[ROPE if flag == "rope" else type(module).__name__, by] += 1
            self.found[flag] += 1
        self.loss()
        for flag in FLAGS:
            if self.flags.get(flag) and not self.found[flag]:
                self.report.warnings.append(f"{flag}: {self.nothing(flag)}")
        return self.report

    def known(self, module):
        what = getattr(type(module), "_liger", (None, None))[1]
        if isinstance(what, probe.GLU):
            return next(flag for flag, acts in GATED.items() if what.act in acts), None
        return {probe.Norm: "rms_norm", probe.Rope: "rope"}.get(type(what)), None

    def recognised(self, module):
        """-> (flag, what it computes | why it is left alone), (None, None) if it is none of our business."""
        name, proof = type(module).__name__.lower(), None
        if self.flags.get("rms_norm") and not module._modules and ("norm" in name or _may_be_norm(module)):
            flag, proof = "rms_norm", probe.norm
        elif self.glu_asked() and ("mlp" in name or "experts" in name or _holds_projections(module)):
            flag, proof = "swiglu", self.glu
        elif self.flags.get("rope") and probe.global_of(type(module).forward, ROPE) is not None:
            flag, proof = "rope", self.rope
        if proof is None:
            return None, None
        if _own_forward(module):
            return flag, "its forward was replaced on the instance"
        key = flag, _traits(module)
        if key not in self.proofs:
            self.proofs[key] = proof(module)
        what = self.proofs[key]
        if isinstance(what, str) and proof is probe.norm and "norm" not in name:
            return None, None
        if isinstance(what, probe.GLU):
            flag = next(flag for flag, acts in GATED.items() if what.act in acts)
            if not self.flags.get(flag):
                return flag, f"it computes {what.act}(gate)·up, which {flag} asks for"
        return flag, what

    def glu_asked(self):
        return any(self.flags.get(flag) for flag in GATED)

    def glu(self, module):
        if any(p is not None and name.endswith("_proj") for name, p in module._parameters.items()):
            return "its experts' weights are stacked, not projections that can be called"
        return probe.glu(module)

    def rope(self, module):
        what = probe.rope(probe.global_of(type(module).forward, ROPE))
        if isinstance(what, str):
            return what
        if not self.rotary:
            return "there is no rotary embedding to learn the layout of cos and sin from"
        return next(filter(None, (probe.angles(rotary, what.interleaved) for rotary in self.rotary)), what)

    def nothing(self, flag):
        seen = [f"{what} ({why})" for what, why in self.report.left_alone]
        return "nothing here is proved equal" + (f"; left alone: {', '.join(seen)}" if seen else "")

    # -- the loss --

    def loss(self):
        if not (self.flags.get("fused_linear_cross_entropy") or self.flags.get("cross_entropy")):
            return
        flag = "fused_linear_cross_entropy" if self.flags.get("fused_linear_cross_entropy") else "cross_entropy"
        for model in self.models:
            fused = isinstance(getattr(model, "_liger", (None, None))[1], CausalLM)
            if (fused if flag != "cross_entropy" else model.__dict__.get("_loss_function") is causal_lm.liger_causal_lm_loss):
                self.found[flag] += 1
                continue
            why = _not_fusable(model, flag)
            if why is not None:
                self.report.left_alone[f"{type(model).__name__}'s loss", why] += 1
                continue
            self.found[flag] += 1
            if flag == "cross_entropy":
                model.__dict__["_liger_loss_before"] = model.__dict__.get("_loss_function")
                model.loss_function = causal_lm.liger_causal_lm_loss
                self.report.replaced[f"{type(model).__name__}.loss_function", "liger_cross_entropy on the logits"] += 1
                continue
            become(model, CausalLM())
            head = model.get_output_embeddings()
            prepare_head(head)
            by = "liger_fused_linear_cross_entropy, no logits"
            if any(getattr(leaf, "_liger", (None, None))[0] is not torch.nn.Linear for leaf in causal_lm.leaves(head)):
                library = type(head).__module__.partition(".")[0]
                by = f"liger_cross_entropy, {library}'s {type(head).__name__} called {causal_lm.CHUNK} rows at a time"
            if not all(hasattr(leaf, "_liger_request") for leaf in causal_lm.leaves(head)):
                self.report.left_alone[f"{type(head).__name__} (head)", "it does not look like a linear layer"] += 1
                by = "the family's own loss on logits"
            self.report.replaced[f"{type(model).__name__}'s head and loss", by] += 1


def _may_be_norm(module):
    return set(module._parameters) <= {"weight"} and any(isinstance(v, float) for v in module.__dict__.values())


def _holds_projections(module):
    return any(set(names) <= set(module._modules) for names in probe.PROJECTIONS)


def _traits(module):
    """What of a module can make it compute something else than another of its class."""
    kept = {k: v for k, v in module.__dict__.items() if not k.startswith("_") and k not in ("training", "layer_idx")}
    plain = {k: v if isinstance(v, (bool, int, float, str, type(None))) else id(v) for k, v in kept.items()}
    children = {k: type(v) for k, v in module._modules.items()}
    tensors = [k for group in (module._parameters, module._buffers) for k, v in group.items() if v is not None]
    return type(module), tuple(plain.items()), tuple(children.items()), tuple(tensors)


def _name_of(what):
    if isinstance(what, probe.Norm):
        return f"liger_rms_norm ({what.casting}, offset {what.offset:g}{'' if what.weight else ', no weight'})"
    if isinstance(what, probe.GLU):
        return "liger_swiglu" if what.act == "silu" else f"liger_geglu ({what.act})"
    return "liger_rotary_pos_emb" + (f" (interleaved={what.interleaved})" if what.interleaved else "")


def causal_lms(model) -> list:
    """The outermost Hugging Face models with a head in ``model``, through PEFT, DDP, FSDP1 and torch.compile."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None:
        return [model]
    return [found for child in model.children() for found in causal_lms(child)]


def _not_fusable(model, flag) -> str | None:
    if not isinstance(getattr(type(model), "loss_function", None), property):
        return "it has no loss_function"
    loss = model.loss_function
    if not causal_lm.is_causal(loss):
        return f"its loss is {getattr(loss, '__name__', loss)}, not ForCausalLMLoss"
    if not any(probe.mentions(cls.__dict__.get("forward"), "loss_function") for cls in type(model).__mro__):
        return "its forward does not call self.loss_function"
    if flag == "fused_linear_cross_entropy" and _own_forward(model):
        return "its forward was replaced on the instance"
    return None


def patch(model: torch.nn.Module, flags: dict[str, bool]) -> Report:
    return _Patcher(model, flags).run()


def revert_model(model: torch.nn.Module) -> None:
    for module in list(model.modules()):
        own = type(module).__dict__.get("_liger")
        if own is not None:
            for name in type(module)._liger_state:
                del module.__dict__[name]
            swap(module, own[0])
        elif hasattr(type(module), "_liger"):
            logger.warning("revert: %s was wrapped after it was patched (FSDP2?) and stays patched", type(module).__name__)
            continue
        if "_liger_loss_before" in module.__dict__:
            del module.__dict__["_loss_function"]
            before = module.__dict__.pop("_liger_loss_before")
            if before is not None:
                module.loss_function = before


# ---- every model of a family ----

_at_birth: dict[type, tuple] = {}  # a family's base class -> (switches, the post_init of its own that it had)


def patch_family(model_type: str, flags: dict[str, bool]) -> Report:
    """Models of the family that are built from now on patch themselves. The report is that of one without weights."""
    revert_family(model_type)
    report = _rehearsal(model_type, flags)
    report.target += ", every one built from now on"
    for base in _bases(model_type):
        _at_birth[base] = dict(flags), base.__dict__.get("post_init")
        base.post_init = _post_init(base)
    return report


def revert_family(model_type: str) -> None:
    for base in _bases(model_type):
        if base in _at_birth:
            _, own = _at_birth.pop(base)
            del base.post_init
            if own is not None:
                base.post_init = own


def _post_init(base):
    def post_init(self):
        flags, own = _at_birth[base]
        super(base, self).post_init() if own is None else own(self)
        patch(self, flags)

    return post_init


def _rehearsal(model_type: str, flags: dict[str, bool]) -> Report:
    cls = _causal_lm_class(model_type)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = cls(cls.config_class(num_hidden_layers=2))
    except Exception as error:
        report = Report(cls.__name__)
        report.warnings.append(f"what will be replaced is not known: a default {cls.__name__} cannot be built ({error})")
        return report
    return patch(model, flags)


def _causal_lm_class(model_type: str) -> type:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return found[0] if isinstance(found, (tuple, list)) else found


def _bases(model_type: str) -> list[type]:
    from transformers import PreTrainedModel

    module = sys.modules[_causal_lm_class(model_type).__module__]
    return [c for c in vars(module).values() if isinstance(c, type) and PreTrainedModel in c.__bases__]
