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
from collections import Counter
from dataclasses import dataclass, field
from types import MethodType

import torch

from liger_kernel.ops import glu
from liger_kernel.transformers import causal_lm, deferred, functional, probe
from liger_kernel.transformers.deferred import Normed, Stream, plain, seen, shared, tensor_of

logger = logging.getLogger(__name__)
ROPE = "apply_rotary_pos_emb"
GATED = {"swiglu": ("silu",), "geglu": ("gelu (tanh)", "gelu")}  # flag -> activations
NORMALISED = "rms_norm", "layer_norm"
FLAGS = ("rope", "cross_entropy", "fused_linear_cross_entropy", *NORMALISED, "swiglu", "geglu", "relu_squared")


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
class HeadNorm:
    """A norm of queries or keys, which waits for RoPE."""

    norm: probe.Norm


@dataclass(frozen=True)
class CausalLM:
    """A model with a head and a loss function: `causal_lm.fused_forward`."""


@functools.cache
def private(cls: type, what) -> type:
    """The subclass of ``cls`` whose forward is ours. One for each pair, so that modules share it."""
    members = _MEMBERS[type(what)](cls, what)
    names = dict(__module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__, __reduce_ex__=_reduce)
    return type(cls)(cls.__name__, (cls,), {**names, "_liger": (cls, what), "_liger_state": {}, **members})


def _reduce(self, protocol):
    """Pickled as (the family's class, what was proved of it); deepcopy comes by here, too."""
    cls, what = self._liger
    made, args, *state = cls.__reduce_ex__(self, max(protocol, 2))
    if made is not copyreg.__newobj__ or args != (private(cls, what),):  # another library's subclass of ours
        return (made, args, *state)
    return (_rebuilt, (cls, what), *state)


def _rebuilt(cls, what):
    return cls.__new__(private(cls, what))


NORMS = probe.Norm, HeadNorm


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
        if not plain(stream) or seen(*self._modules.values()):
            return cls.forward(self, *args, **kwargs)
        if args:
            args = Stream(stream), *others
        else:
            kwargs[what.stream] = Stream(stream)
        out = cls.forward(self, *args, **kwargs)
        return tuple(map(tensor_of, out)) if type(out) is tuple else tensor_of(out)

    return {"forward": forward}


def _glu_members(cls, what):
    act = {"silu": "silu", "gelu (tanh)": "tanh", "gelu": "none"}[what.act]

    # The projections are called, all three: they may be quantised, sharded, or carry a LoRA.
    def forward(self, x):
        gate, up = getattr(self, what.gate), getattr(self, what.up)
        if gate is up:
            a, b = gate(x).chunk(2, dim=-1)
        else:
            x = shared(x, (gate, up))
            a, b = gate(x), up(x)
        return glu.gated_linear(a, b, act, getattr(self, what.down))

    return {"forward": forward}


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
        layers = (m for m in self._modules.values() if not isinstance(_known_as(m), NORMS))
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
            "_liger_proved": None,  # the tail that is declared, and the one that the first step has shown
            "_liger_unfusable": None,  # why it gets real logits
        },
    }


_MEMBERS = {
    probe.Norm: _norm_members,
    probe.LayerNorm: _layer_norm_members,
    probe.GLU: _glu_members,
    probe.Rope: _rope_members,
    probe.Block: _block_members,
    HeadNorm: _norm_members,
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
        if "_liger_request" not in leaf.__dict__ and _gives_logits(leaf) and not _own_forward(leaf):
            become(leaf, Head())


def _gives_logits(leaf) -> bool:
    return isinstance(leaf, torch.nn.Module) and hasattr(leaf, "out_features")


class _Patcher:
    def __init__(self, model, flags):
        self.model, self.flags = model, {flag for flag in FLAGS if flags.get(flag)}
        self.models = causal_lms(model)
        self.report = Report(type(self.models[0] if self.models else model).__name__)
        self.done = set()  # flags for which there is something, be it from an earlier call
        self.obstacles = {flag: [] for flag in FLAGS}
        self.proofs = {}
        self.rotary = [m for m in model.modules() if "rotary" in type(m).__name__.lower() and m._buffers]

    def run(self) -> Report:
        for module in list(self.model.modules()):
            what = _known_as(module)
            if what is None:
                for flag, look in LOOKS:
                    if flag in self.flags and look(module):
                        self.replace(flag, module)
                        break
            elif type(what) in FLAG_OF:
                self.done.add(FLAG_OF[type(what)](what))
        if "rms_norm" in self.flags:
            for module in list(self.model.modules()):
                if _may_be_block(module):
                    self.block(module)
                elif isinstance(_known_as(module), probe.Rope):
                    self.head_norms(module)
        for flag, has_it, give_it in LOSSES:
            for model in self.models if flag in self.flags else ():
                self.loss(flag, model, has_it, give_it)
        for flag in FLAGS:
            if flag in self.flags - self.done:
                left = "; left alone: " + ", ".join(dict.fromkeys(self.obstacles[flag])) if self.obstacles[flag] else ""
                self.report.warnings.append(f"{flag}: nothing here is proved equal{left}")
        return self.report

    def replace(self, flag, module):
        what, name = self.proof(flag, module), type(module).__name__
        if isinstance(what, probe.GLU) and _glu_flag(what) not in self.flags:
            what = f"it computes {what.act}(gate)·up, which is {_glu_flag(what)}'s"
        if type(what) in NORM_FLAGS and NORM_FLAGS[type(what)] not in self.flags:
            what = f"it computes what is {NORM_FLAGS[type(what)]}'s"
        if not isinstance(what, str):
            become(module, what)
            self.report.replaced[ROPE if flag == "rope" else name, _name_of(what)] += 1
            self.done.add(FLAG_OF[type(what)](what))
        elif flag not in NORMALISED or "norm" in name.lower():
            self.leave(flag, name, what)

    def block(self, module):
        key = "block", _traits(module)
        if key not in self.proofs:
            own = "its forward was replaced on the instance"
            self.proofs[key] = own if _own_forward(module) else probe.block(module)
        what, name = self.proofs[key], type(module).__name__
        if isinstance(what, str):
            self.report.left_alone[f"{name}'s residual stream", what] += 1
        else:
            become(module, what)
            self.report.replaced[f"{name}'s residual stream", f"liger_fused_add_rms_norm ({what.norms} a layer)"] += 1

    def head_norms(self, attention):
        for names in () if _known_as(attention).one else HEAD_NORMS:
            norms = [attention._modules.get(name) for name in names]
            first = all(probe.reads_before(type(attention)._liger[0].forward, name, ROPE) for name in names)
            if first and all(_is_of_heads(norm, attention) for norm in norms):
                for norm in norms:
                    what = _known_as(norm)
                    swap(norm, type(norm)._liger[0])
                    become(norm, HeadNorm(what))
                self.report.replaced[f"{type(attention).__name__}'s {' and '.join(names)}", "liger_norm_rope"] += 1

    def leave(self, flag, name, why):
        self.report.left_alone[name, why] += 1
        for asked in next((group for group in (GATED, NORMALISED) if flag in group), (flag,)):
            self.obstacles[asked].append(f"{name} ({why})")

    def proof(self, flag, module):
        if _own_forward(module):
            return "its forward was replaced on the instance"
        key = flag, _traits(module)
        if key not in self.proofs:
            proofs = {"rms_norm": probe.norm, "layer_norm": probe.norm, "rope": self.rope}
            self.proofs[key] = proofs.get(flag, _glu)(module)
        return self.proofs[key]

    def rope(self, attention):
        pairs = getattr(getattr(attention, "config", None), "rope_interleave", False)
        if pairs and probe.mentions(type(attention).forward, f"{ROPE}_interleave"):
            return "it takes pairs and gives halves (rope_interleave)"
        what = probe.rope(probe.global_of(type(attention).forward, ROPE))
        if isinstance(what, str):
            return what
        if not self.rotary:
            return "there is no rotary embedding to learn the layout of cos and sin from"
        return next(filter(None, (probe.angles(rotary, what.interleaved) for rotary in self.rotary)), what)

    def loss(self, flag, model, has_it, give_it):
        name = f"{type(model).__name__}'s loss"
        if not has_it(model):
            why = _obstacle(model, flag)
            if why is not None:
                return self.leave(flag, name, why)
            self.report.replaced[name, give_it(model)] += 1
        self.done.add(flag)


# ---- what a module may be ----


def _known_as(module):
    """What a patched module's class was proved to be."""
    return getattr(type(module), "_liger", (None, None))[1]


def _may_be_norm(module) -> bool:
    weight_alone = not module._modules and set(module._parameters) <= {"weight", "bias"}
    numbers = any(isinstance(value, float) for value in module.__dict__.values())
    return not module._modules and "norm" in type(module).__name__.lower() or weight_alone and numbers


def _may_be_glu(module) -> bool:
    name, children = type(module).__name__.lower(), set(module._modules)
    return "mlp" in name or "experts" in name or any(set(names) <= children for names in probe.PROJECTIONS)


def _is_of_heads(norm, attention) -> bool:
    """Whether it is a norm of ours and as wide as a head; of a weight that ZeRO-3 has taken away, too."""
    if not isinstance(_known_as(norm), probe.Norm):
        return False
    weight = norm._parameters.get("weight")
    return weight is None or getattr(weight, "ds_shape", weight.shape)[-1] == getattr(attention, "head_dim", None)


HEAD_NORMS = ("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm")


def _may_be_block(module) -> bool:
    """A decoder layer with a norm of ours: transformers marks what it may checkpoint."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not isinstance(module, GradientCheckpointingLayer) or _known_as(module) is not None:
        return False
    return any(isinstance(_known_as(child), probe.Norm) for child in module.children())


def _may_turn(module) -> bool:
    return probe.global_of(type(module).forward, ROPE) is not None


def _glu(module):
    if any(p is not None and name.endswith("_proj") for name, p in module._parameters.items()):
        return "its experts' weights are stacked, not projections that can be called"
    return probe.glu(module)


def _glu_flag(what: probe.GLU) -> str:
    return next(flag for flag, activations in GATED.items() if what.act in activations)


NORM_FLAGS = {probe.Norm: "rms_norm", HeadNorm: "rms_norm", probe.LayerNorm: "layer_norm"}
LOOKS = (
    *((flag, _may_be_norm) for flag in NORMALISED),
    *((flag, _may_be_glu) for flag in GATED),
    ("rope", _may_turn),
)
FLAG_OF = {
    **{kind: lambda what: NORM_FLAGS[type(what)] for kind in NORM_FLAGS},
    probe.Rope: lambda what: "rope",
    probe.GLU: _glu_flag,
}


def _traits(module):
    """What of a module can make it compute something else than another of its class."""
    kept = {k: v for k, v in module.__dict__.items() if not k.startswith("_") and k not in ("training", "layer_idx")}
    simple = {k: v if isinstance(v, (bool, int, float, str, type(None))) else id(v) for k, v in kept.items()}
    children = {k: type(v) for k, v in module._modules.items()}
    tensors = [k for group in (module._parameters, module._buffers) for k, v in group.items() if v is not None]
    return type(module), tuple(simple.items()), tuple(children.items()), tuple(tensors)


def _name_of(what) -> str:
    if isinstance(what, probe.Norm):
        return f"liger_rms_norm ({what.casting}, offset {what.offset:g}{'' if what.weight else ', no weight'})"
    if isinstance(what, probe.LayerNorm):
        return "liger_layer_norm"
    if isinstance(what, probe.GLU):
        return "liger_swiglu" if what.act == "silu" else f"liger_geglu ({what.act})"
    layout = f"interleaved={what.interleaved}" if what.interleaved in (True, "repeated") else "half as wide tables"
    return "liger_rotary_pos_emb" + (f" ({layout})" if what.interleaved else "")


# ---- the loss ----


def _has_loss_in_head(model) -> bool:
    return isinstance(_known_as(model), CausalLM)


def _put_loss_in_head(model) -> str:
    become(model, CausalLM())
    head = model.get_output_embeddings()
    prepare_head(head)
    leaves = causal_lm.leaves(head)
    if all(type(leaf)._liger[0] is torch.nn.Linear for leaf in leaves):
        return "liger_fused_linear_cross_entropy, no logits"
    library = type(head).__module__.partition(".")[0]
    return f"liger_cross_entropy, {library}'s {type(head).__name__} called {causal_lm.CHUNK} rows at a time"


def _has_loss_on_logits(model) -> bool:
    return model.__dict__.get("_loss_function") is causal_lm.liger_causal_lm_loss


def _put_loss_on_logits(model) -> str:
    model.__dict__["_liger_loss_before"] = model.__dict__.get("_loss_function")
    model.loss_function = causal_lm.liger_causal_lm_loss
    return "liger_cross_entropy, on logits"


LOSSES = (
    ("fused_linear_cross_entropy", _has_loss_in_head, _put_loss_in_head),
    ("cross_entropy", _has_loss_on_logits, _put_loss_on_logits),
)


def _obstacle(model, flag) -> str | None:
    if not isinstance(getattr(type(model), "loss_function", None), property):
        return "it has no loss_function"
    loss = model.loss_function
    if not causal_lm.is_causal(loss):
        return f"it is {getattr(loss, '__name__', loss)}, not ForCausalLMLoss"
    if not any(probe.mentions(cls.__dict__.get("forward"), "loss_function") for cls in type(model).__mro__):
        return "the model's forward does not call self.loss_function"
    if flag == "cross_entropy":
        return None
    if _own_forward(model):
        return "the model's forward was replaced on the instance"
    head = model.get_output_embeddings()
    if not all(_gives_logits(leaf) and not _own_forward(leaf) for leaf in causal_lm.leaves(head)):
        return f"nothing is known of the model's head, {type(head).__name__}"
    return None


def causal_lms(model) -> list:
    """The outermost Hugging Face models with a head in ``model``, through PEFT, DDP, FSDP1 and torch.compile."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None:
        return [model]
    return [found for child in model.children() for found in causal_lms(child)]


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
            logger.warning("revert: %s was given another class after it was patched, and stays", type(module).__name__)
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
    cls = _model_class(model_type)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = cls(_small(cls.config_class()))
    except Exception as error:
        return Report(cls.__name__, warnings=[f"a default model cannot be built, to show what it replaces ({error})"])
    return patch(model, flags)


def _small(config):
    """Two layers, of the text model and of the others that it has."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if isinstance(getattr(part, "num_hidden_layers", None), int):
            part.num_hidden_layers = min(part.num_hidden_layers, 2)
    return config


def _modeling(model_type: str):
    """The family's modeling module."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ImportError(f"the installed transformers has no models of type {model_type!r}")
    return importlib.import_module(CONFIG_MAPPING[model_type].__module__.replace(".configuration_", ".modeling_"))


def _model_class(model_type: str) -> type:
    """The family's model with a head, or the first that is built from its configuration."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    module, config = _modeling(model_type), CONFIG_MAPPING[model_type]
    for name in ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"):
        found = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING").get(config, None)
        found = found[0] if isinstance(found, (tuple, list)) else found
        if found is not None and found.__module__ == module.__name__:
            return found
    return next(
        c
        for c in vars(module).values()
        if isinstance(c, type) and c.__dict__.get("config_class") is config and "PreTrained" not in c.__name__
    )


def _bases(model_type: str) -> list[type]:
    from transformers import PreTrainedModel

    return [c for c in vars(_modeling(model_type)).values() if isinstance(c, type) and PreTrainedModel in c.__bases__]
