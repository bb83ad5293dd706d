"""Replacing what is proved equal, in one model.

Every module that may be a norm, a gated MLP, experts, or an attention with RoPE is tried (`probe`), and what is proved
becomes an object of a private subclass (`private`); then the layers around the norms, and at last the loss.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch.torch_version import TorchVersion

from liger_kernel._version import OLDEST_TRANSFORMERS
from liger_kernel.patch import causal_lm, loss_in_head, probe
from liger_kernel.patch.kinds import CausalLM, HeadNorm, Norm, Rope
from liger_kernel.patch.parts import Reads, unchanged
from liger_kernel.patch.private import ROPE, become, known_as, own_forward, swap
from liger_kernel.patch.report import Report

logger = logging.getLogger(__name__)
NORMS, GATED = ("rms_norm", "layer_norm"), ("swiglu", "geglu")
FLAGS = ("rope", "cross_entropy", "fused_linear_cross_entropy", *NORMS, *GATED, "relu_squared")


class _Patcher:
    def __init__(self, model, flags):
        self.model, self.flags = model, {flag for flag in FLAGS if flags.get(flag)}
        self.models = causal_lms(model)
        self.report = Report(type(self.models[0] if self.models else model).__name__)
        self.done = set()  # flags for which there is something, be it from an earlier call
        self.obstacles = {flag: [] for flag in FLAGS}
        self.proofs = {}  # modules of one outline: what each was proved to be, and the parts that this rests on
        self.rotations = {}  # functions, and tables of angles, with what is known of them
        self.paths = {module: path for path, module in model.named_modules()}
        self.rotary = [m for m in self.paths if "rotary" in type(m).__name__.lower() and m._buffers]

    def run(self) -> Report:
        norm, gated = functools.partial(self.proof, probe.norm), functools.partial(self.proof, probe.gated)
        looks = (NORMS, _may_be_norm, norm), (GATED, _may_be_glu, gated), (("rope",), _may_turn, self.rope)
        for module in list(self.model.modules()):
            what = known_as(module)
            if what is not None:
                self.done.add(what.flag)
                continue
            for flags, look, proof in looks:
                if self.flags.intersection(flags) and look(module):
                    self.replace(flags, proof, module)
                    break
        if "rms_norm" in self.flags:
            for module in list(self.model.modules()):
                if _may_be_block(module):
                    self.block(module)
                elif isinstance(known_as(module), Rope):
                    self.head_norms(module)
        for flag, has_it, give_it in LOSSES:
            for model in self.models if flag in self.flags else ():
                self.loss(flag, model, has_it, give_it)
        for flag in FLAGS:
            if flag in self.flags - self.done:
                left = "; left alone: " + ", ".join(dict.fromkeys(self.obstacles[flag])) if self.obstacles[flag] else ""
                self.report.warnings.append(f"{flag}: nothing here is proved equal{left}")
        return self.report

    def replace(self, flags, proof, module):
        name = type(module).__name__
        what, parts = proof(module)
        if not isinstance(what, str) and what.flag not in self.flags:
            what = f"it computes what is {what.flag}'s"
        if not isinstance(what, str):
            become(module, what, parts)
            self.report.replaced[ROPE if isinstance(what, Rope) else name, what.kernel] += 1
            self.done.add(what.flag)
        elif flags != NORMS or "norm" in name.lower():
            self.leave(flags, name, what)

    def proof(self, proof, module):
        """What it is proved to be, or why it is left alone, and the parts that say so: once for all that share them."""
        if own_forward(module):
            return "its forward was replaced on the instance", ()
        known = self.proofs.setdefault((proof, _outline(module)), [])
        for what, parts in known:
            if unchanged(module, parts):
                return what, parts
        reads = Reads()
        known.append((proof(module, reads), reads.parts()))
        return known[-1]

    def block(self, module):
        name = f"{type(module).__name__}'s residual stream"
        what, parts = self.proof(probe.block, module)
        if isinstance(what, str):
            self.report.left_alone[name, what] += 1
        else:
            become(module, what, parts)
            self.report.replaced[name, what.kernel] += 1

    def head_norms(self, attention):
        for names in () if known_as(attention).one else HEAD_NORMS:
            norms = [attention._modules.get(name) for name in names]
            first = all(probe.reads_before(type(attention)._liger[0].forward, name, ROPE) for name in names)
            if first and all(_is_of_heads(norm, attention) for norm in norms):
                for norm in norms:
                    (cls, what), parts = type(norm)._liger, type(norm)._liger_parts
                    swap(norm, cls)
                    become(norm, HeadNorm(what), parts)
                self.report.replaced[f"{type(attention).__name__}'s {' and '.join(names)}", HeadNorm.kernel] += 1

    def leave(self, flags, name, why):
        self.report.left_alone[name, why] += 1
        for flag in flags:
            self.obstacles[flag].append(f"{name} ({why})")

    def rope(self, attention):
        """By no parts: the attention's own forward runs, with another function."""
        return "its forward was replaced on the instance" if own_forward(attention) else self.rotation(attention), ()

    def rotation(self, attention):
        pairs = getattr(getattr(attention, "config", None), "rope_interleave", False)
        if pairs and probe.mentions(type(attention).forward, f"{ROPE}_interleave"):
            return "it takes pairs and gives halves (rope_interleave)"
        what = self.once(probe.rope, probe.global_of(type(attention).forward, ROPE))
        if isinstance(what, str):
            return what
        if not self.rotary:
            return "there is no rotary embedding to learn the layout of cos and sin from"
        unknown = (self.once(probe.angles, rotary, what.interleaved) for rotary in self.rotary_of(attention))
        return next(filter(None, unknown), what)

    def once(self, proof, *given):
        if given not in self.rotations:
            self.rotations[given] = proof(*given)
        return self.rotations[given]

    def rotary_of(self, attention):
        """The rotary embeddings in the smallest part of the model that has both."""
        path = self.paths[attention]
        while True:
            found = [rotary for rotary in self.rotary if self.paths[rotary].startswith(path and f"{path}.")]
            if found or not path:
                return found
            path = path.rpartition(".")[0]

    def loss(self, flag, model, has_it, give_it):
        name = f"{type(model).__name__}'s loss"
        if not has_it(model):
            why = _obstacle(model, flag)
            if why is not None:
                return self.leave([flag], name, why)
            self.report.replaced[name, give_it(model)] += 1
        self.done.add(flag)


# ---- what a module may be ----


def _may_be_norm(module) -> bool:
    weight_alone = not module._modules and set(module._parameters) <= {"weight", "bias"}
    numbers = any(isinstance(value, float) for value in module.__dict__.values())
    return not module._modules and "norm" in type(module).__name__.lower() or weight_alone and numbers


def _may_be_glu(module) -> bool:
    name, children = type(module).__name__.lower(), set(module._modules)
    return "mlp" in name or "experts" in name or any(set(names) <= children for names in probe.PROJECTIONS)


def _is_of_heads(norm, attention) -> bool:
    """Whether it is a norm of ours and as wide as a head; of a weight that ZeRO-3 has taken away, too."""
    if not isinstance(known_as(norm), Norm):
        return False
    weight = norm._parameters.get("weight")
    return weight is None or getattr(weight, "ds_shape", weight.shape)[-1] == getattr(attention, "head_dim", None)


HEAD_NORMS = ("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm")


def _may_be_block(module) -> bool:
    """A decoder layer with a norm of ours: transformers marks what it may checkpoint."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not isinstance(module, GradientCheckpointingLayer) or known_as(module) is not None:
        return False
    return any(isinstance(known_as(child), Norm) for child in module.children())


def _may_turn(module) -> bool:
    return probe.global_of(type(module).forward, ROPE) is not None


def _outline(module):
    """What a proof looks at by itself: the class, which members there are, and of which classes."""
    attributes = tuple((name, type(value)) for name, value in module.__dict__.items())
    tensors = tuple((k, v is None) for held in (module._parameters, module._buffers) for k, v in held.items())
    children = [(k, type(v), v is not None and any(True for _ in v.parameters())) for k, v in module._modules.items()]
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return type(module), attributes, tensors, tuple(children), implementation


# ---- the loss ----


def _has_loss_in_head(model) -> bool:
    return isinstance(known_as(model), CausalLM)


def _put_loss_in_head(model) -> str:
    become(model, CausalLM())
    head = model.get_output_embeddings()
    loss_in_head.prepare(head)
    if all(type(leaf).forward is torch.nn.Linear.forward for leaf in loss_in_head.leaves(head)):
        return "liger_fused_linear_cross_entropy, no logits"
    library = type(head).__module__.partition(".")[0]
    return f"liger_cross_entropy, {library}'s {type(head).__name__} called {loss_in_head.CHUNK} rows at a time"


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
    if own_forward(model):
        return "the model's forward was replaced on the instance"
    head = model.get_output_embeddings()
    known = (loss_in_head.is_prepared(leaf) or not own_forward(leaf) for leaf in loss_in_head.leaves(head))
    if not (all(known) and all(map(loss_in_head.gives_logits, loss_in_head.leaves(head)))):
        return f"nothing is known of the model's head, {type(head).__name__}"
    return None


def causal_lms(model) -> list:
    """The outermost Hugging Face models with a head in ``model``, through PEFT, DDP, FSDP1 and torch.compile."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None:
        return [model]
    return [found for child in model.children() for found in causal_lms(child)]


def check_transformers() -> None:
    import transformers

    if TorchVersion(transformers.__version__) < OLDEST_TRANSFORMERS:
        raise ImportError(
            f"liger-kernel patches models of transformers {OLDEST_TRANSFORMERS} or newer, installed is "
            f"{transformers.__version__}: pip install -U transformers"
        )


def patch(model: torch.nn.Module, flags: dict[str, bool]) -> Report:
    check_transformers()
    return _Patcher(model, flags).run()


def revert_model(model: torch.nn.Module) -> None:
    for module in list(model.modules()):
        loss_in_head.give_back(module)
        own = type(module).__dict__.get("_liger")
        if own is not None:
            for name in type(module)._liger_state:
                module.__dict__.pop(name, None)
            swap(module, own[0])
        elif hasattr(type(module), "_liger"):
            logger.warning("revert: %s was given another class after it was patched, and stays", type(module).__name__)
            continue
        if "_liger_loss_before" in module.__dict__:
            del module.__dict__["_loss_function"]
            before = module.__dict__.pop("_liger_loss_before")
            if before is not None:
                module.loss_function = before
