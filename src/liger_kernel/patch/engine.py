"""Patches one model. What happens to it, from ``apply_liger_kernel(model, **switches)`` on:

1. `families/published` checks the switches, fills in the defaults of those that were not given, and
   calls `patch`. The name of a switch is called a *flag*.
2. `patch` makes a `Walk` over the modules of the model.
3. The walk goes through `STAGES`. In each stage it tries at most one rewrite on a module: the first
   that was asked for and whose `could_apply` says yes. A rewrite is an object; its class is in a
   file of `layers` or `loss`.
4. Most rewrites prove what the module computes (`Walk.prove_once`). First `proof/purity` reads the
   module's code, and rejects what no run could show, such as side effects and branches. Then comes
   the *trial*: `proof/probe` runs a small copy of the module, and the rewrite compares output and
   gradients with a reference. `proof/parts` records which attributes the copy reads, and their
   values: the *parts*. The result holds for every module of the same class and
   members with equal parts.
5. The result of a proof is a `Replacement`, or the reason why the module is left alone. For a
   replacement, `proof/private` changes the module's class to a private subclass. At every call its
   forward checks that parts and code are still those that were proved; if so it runs our operator,
   otherwise the model's own forward. Replacements that are not `guarded` check by themselves.
6. The rewrites of RoPE, the loss, masks, checkpoints and the load-balancing loss decide in ways of
   their own, which their files describe. `loss/rewrites` either has the loss computed in the head,
   so that no logits are stored, or computes it from the logits by our operator.
7. `patch` returns a `Report`: what was replaced, what was left alone and why.

`revert_model` undoes it."""

from __future__ import annotations

import logging

import torch
from torch.torch_version import TorchVersion

from liger_kernel._version import OLDEST_TRANSFORMERS
from liger_kernel.patch.layers import adapters, offloading
from liger_kernel.patch.layers.adapters import LoRALayers
from liger_kernel.patch.layers.balancing import LoadBalancing
from liger_kernel.patch.layers.experts import StackedExperts
from liger_kernel.patch.layers.gated_norm import GatedNorms
from liger_kernel.patch.layers.graphed_layers import GraphedLayers
from liger_kernel.patch.layers.kept_layers import KeptLayers
from liger_kernel.patch.layers.linear_attention import LinearAttentions
from liger_kernel.patch.layers.lora_experts import LoRAExperts
from liger_kernel.patch.layers.mask import CausalMasks
from liger_kernel.patch.layers.mlp import GatedMLPs
from liger_kernel.patch.layers.norm import Norms
from liger_kernel.patch.layers.offloading import OffloadedCheckpoints
from liger_kernel.patch.layers.plain_mlp import PlainMLPs
from liger_kernel.patch.layers.rope import Ropes
from liger_kernel.patch.layers.router import Routers
from liger_kernel.patch.layers.tiled_mlp import TiledMLPs
from liger_kernel.patch.loss import head, trl_head
from liger_kernel.patch.loss.rewrites import (
    LossInHead,
    LossOnLogits,
    TRLHeads,
    causal_lms,
    revert_loss_on_logits,
)
from liger_kernel.patch.proof import private, purity
from liger_kernel.patch.proof.parts import ReadRecorder, module_signature, unchanged
from liger_kernel.patch.proof.report import Report
from liger_kernel.patch.proof.rewrite import Replacement, replacement_of

logger = logging.getLogger(__name__)

# Each stage goes over all modules. Stages that come later build on what earlier ones have replaced.
STAGES = (
    # the order matters where two could apply: GatedNorms before Norms; PlainMLPs and StackedExperts
    # before GatedMLPs
    (
        Routers(),
        GatedNorms(),
        Norms(),
        PlainMLPs(),
        StackedExperts(),
        GatedMLPs(),
        Ropes(),
        LinearAttentions(),
    ),
    (TiledMLPs(),),  # MLPs in tiles, replaced before or not
    # those of tables, whose experts are replaced by now, and of layers; also of later ones
    (LoRAExperts(), LoRALayers()),
    (KeptLayers(),),
    (OffloadedCheckpoints(),),  # all other layers
    (GraphedLayers(),),  # that are none of these
    (LossInHead(),),
    (LossOnLogits(),),  # one call asks for at most one of the two losses
    (TRLHeads(),),
    (LoadBalancing(),),  # after LossInHead, whose replacement it extends
    (CausalMasks(),),
)
# every flag once, in the order of the stages
FLAGS = tuple(
    dict.fromkeys(flag for stage in STAGES for rewrite in stage for flag in rewrite.flags)
)


def patch(
    model: torch.nn.Module, switches: dict[str, bool | int], trusted: tuple[type, ...] = ()
) -> Report:
    """Replace, in place, whatever in the model is found equal to one of our operators.

    Args:
        switches: those of `apply_liger_kernel` with their values: on or off, for tiled MLPs also
            the tokens of a tile, for layers that are kept their number.
        trusted: classes that the user vouches for. `purity` does not inspect their code; their
            modules are tried like others.

    Raises:
        ImportError: transformers is too old.
    """
    check_transformers()
    return Walk(model, switches, trusted).run()


def check_transformers() -> None:
    import transformers

    # torch's class, since the package `packaging` need not be installed
    if TorchVersion(transformers.__version__) < OLDEST_TRANSFORMERS:
        raise ImportError(
            f"liger-kernel patches models of transformers {OLDEST_TRANSFORMERS} or newer, "
            f"installed is {transformers.__version__}: pip install -U transformers"
        )


class Walk:
    """Patches one model: what was asked for, and what has been found out so far.

    Rewrites read its attributes. Those that replace something without `convert` update `report` and
    `flags_done` themselves.
    """

    def __init__(self, model, switches, trusted):
        self.model = model
        self.switches = switches
        # the flags of the switches that are on
        self.flags_on = {flag for flag in FLAGS if switches.get(flag)}
        # classes whose code is not inspected before a trial
        self.trusted = trusted
        # module to visit -> its path in the model; TorchScript modules cannot change their class
        self.module_paths = {}
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self.module_paths[module] = path
        # the causal language models in it, which may be within PEFT, DDP or torch.compile
        self.causal_lms = causal_lms(model)
        # the report names the language model, not a wrapper around it
        target = self.causal_lms[0] if self.causal_lms else model
        self.report = Report(type(target).__name__)
        # flags that have an effect on this model, by this call or an earlier one
        self.flags_done = set()
        # flag -> what was left alone under it, for the warning that a flag has no effect
        self.obstacles = {flag: [] for flag in FLAGS}
        # (prove, signature of a module) -> [(result, parts), ...]; `prove` is a plain function
        self.proofs = {}
        # (function, *args) -> what `call_once` got from it
        self.call_results = {}

    def run(self) -> Report:
        # switches whose replacements are there from an earlier call
        for module in self.module_paths:
            replacement = replacement_of(module)
            if replacement is not None:
                self.flags_done.update(replacement.flags)
        for stage in STAGES:
            rewrites = [rewrite for rewrite in stage if self._is_asked_for(rewrite)]
            for module in self.module_paths:
                self._try_first(rewrites, module)
        for flag in FLAGS:
            if flag in self.flags_on - self.flags_done:
                self._warn_no_effect(flag)
        return self.report

    def _is_asked_for(self, rewrite) -> bool:
        """Return True if one of its flags is on. A rewrite without flags of its own
        (`CausalMasks`) runs whenever any flag is on."""
        if not self.flags_on:
            return False
        return not rewrite.flags or not self.flags_on.isdisjoint(rewrite.flags)

    def _try_first(self, rewrites, module) -> None:
        """Apply the first of the rewrites that could apply to the module, which an earlier stage
        may have replaced."""
        replacement = replacement_of(module)  # None: not replaced so far
        for rewrite in rewrites:
            # by default `applies_to` is NoneType: modules that are not replaced yet
            if isinstance(replacement, rewrite.applies_to) and rewrite.could_apply(module):
                rewrite.apply(self, module)
                return

    def _warn_no_effect(self, flag) -> None:
        warning = f"{flag}: nothing here is proved equal"
        if self.obstacles[flag]:
            left_alone = dict.fromkeys(self.obstacles[flag])
            warning += f"; left alone: {', '.join(left_alone)}"
        self.report.warnings.append(warning)

    # ---- what rewrites call ----

    def convert(self, module, replacement, parts, name) -> None:
        """Change the module's class to the private subclass with this replacement, and report it.

        ``name``: what is replaced, in the words of the report."""
        private.convert_module(module, replacement, parts)
        kernel_name = replacement.kernel
        if isinstance(module, self.trusted):
            kernel_name += ", trusted"
        self.report.add(name, kernel_name, replacement.column)
        self.flags_done.update(replacement.flags)

    def leave_alone(self, flags, name, reason) -> None:
        """Report that a module is left alone, and why.

        ``flags``: those under which it would have been replaced."""
        self.report.left_alone[name, reason] += 1
        for flag in flags:
            self.obstacles[flag].append(f"{name} ({reason})")

    def prove_once(self, prove, module) -> tuple[Replacement | str, tuple]:
        """Return the result of ``prove(module, recorder)``, and the parts that it rests on.

        The result is a `Replacement`, or the reason why the module is left alone. It also holds for
        later modules of the same signature (`module_signature`) that have these parts. Without
        parts it holds for all of that signature, so ``prove`` records a value before it rejects
        one."""
        if private.has_instance_forward(module):
            return "its forward was replaced on the instance", ()
        proofs = self.proofs.setdefault((prove, module_signature(module)), [])
        for result, parts in proofs:
            if unchanged(module, parts):
                return result, parts
        proofs.append(self._prove(prove, module))
        return proofs[-1]

    def call_once(self, function, *args):
        """Return ``function(*args)``; within this walk it is called once for the same arguments."""
        key = function, *args
        if key not in self.call_results:
            self.call_results[key] = function(*args)
        return self.call_results[key]

    def reason_unprovable(self, module, children=True) -> str | None:
        """Return why a trial would prove nothing of the module's code, or None (`purity`).

        ``children``: inspect the code of its children, too."""
        return purity.reason_unprovable(module, trusted=self.trusted, children=children)

    def _prove(self, prove, module) -> tuple[Replacement | str, tuple]:
        reason = self.reason_unprovable(module)
        if reason is not None:
            return reason, ()
        recorder = ReadRecorder()
        result = prove(module, recorder)
        parts = recorder.parts()
        is_proved = not isinstance(result, str)
        if is_proved and not isinstance(module, self.trusted):
            # the trial has recorded which methods of the module's attributes forward calls
            reason = purity.reason_called_unprovable(module, parts, self.trusted)
            if reason is not None:
                return reason, parts
        return result, parts


def revert_model(model: torch.nn.Module) -> None:
    """Undo `patch`: give every module its class, its forward and its loss back."""
    for module in list(model.modules()):
        head.uninstall_forward(module)
        offloading.revert(module)
        adapters.revert(module)
        _revert_module(module)
    trl_head.uninstall(model.modules())


def _revert_module(module: torch.nn.Module) -> None:
    cls = type(module)
    if private.is_patched(module):
        if "_liger" not in vars(cls):
            # another library has derived a class from ours; the module stays patched, with its loss
            logger.warning(
                "revert: %s was given another class after it was patched, and stays", cls.__name__
            )
            return
        for name in cls._liger_state:  # attributes that patching has added
            module.__dict__.pop(name, None)
        private.set_class(module, private.original_class(cls))
    revert_loss_on_logits(module)
