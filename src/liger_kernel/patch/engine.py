"""Replacing what is proved equal, in one model: the table of the rewrites, and the walk over the
model's modules."""

from __future__ import annotations

import logging

import torch
from torch.torch_version import TorchVersion

from liger_kernel._version import OLDEST_TRANSFORMERS
from liger_kernel.patch.layers import offloading
from liger_kernel.patch.layers.balancing import LoadBalancing
from liger_kernel.patch.layers.experts import StackedExperts
from liger_kernel.patch.layers.gated_norm import GatedNorms
from liger_kernel.patch.layers.mask import CausalMasks
from liger_kernel.patch.layers.mlp import GatedMLPs
from liger_kernel.patch.layers.norm import Norms
from liger_kernel.patch.layers.offloading import OffloadedCheckpoints
from liger_kernel.patch.layers.plain_mlp import PlainMLPs
from liger_kernel.patch.layers.rope import Ropes
from liger_kernel.patch.layers.router import Routers
from liger_kernel.patch.layers.tiled_mlp import TiledMLPs
from liger_kernel.patch.loss import head
from liger_kernel.patch.loss.rewrites import LossInHead, LossOnLogits, causal_lms
from liger_kernel.patch.proof import private, purity
from liger_kernel.patch.proof.parts import Reads, outline, unchanged
from liger_kernel.patch.proof.report import Report
from liger_kernel.patch.proof.rewrite import known_as

logger = logging.getLogger(__name__)

# Stage by stage over all modules; within a stage a module is the first's that it may be of.
STAGES = (
    (Routers(), GatedNorms(), Norms(), PlainMLPs(), StackedExperts(), GatedMLPs(), Ropes()),
    (TiledMLPs(),),  # of MLPs that are ours by now
    (OffloadedCheckpoints(),),
    (LossInHead(),),
    (LossOnLogits(),),
    (LoadBalancing(),),
    (CausalMasks(),),
)
FLAGS = (*dict.fromkeys(flag for stage in STAGES for rewrite in stage for flag in rewrite.flags),)


class _Walk:
    """Over one model: what is asked for, what there is, what is known so far."""

    def __init__(self, model, flags, trusted):
        self.model, self.flags, self.given = (
            model,
            {flag for flag in FLAGS if flags.get(flag)},
            flags,
        )
        modules = {module: path for path, module in model.named_modules()}
        self.paths = {
            m: path for m, path in modules.items() if not isinstance(m, torch.jit.ScriptModule)
        }
        self.trusted = trusted  # classes whose code is tried without a look at it
        self.models = causal_lms(model)
        self.report = Report(type(self.models[0] if self.models else model).__name__)
        self.done = set()  # flags for which there is something, be it from an earlier call
        self.obstacles = {flag: [] for flag in FLAGS}
        # modules of one outline: what each was proved to be, and the parts that this rests on
        self.proofs = {}
        self.answers = {}  # of `once`

    def run(self) -> Report:
        known = [what for what in map(known_as, self.paths) if what is not None]
        self.done.update(flag for what in known for flag in what.flags)
        for stage in STAGES:
            rewrites = [
                r for r in stage if self.flags and (not r.flags or self.flags.intersection(r.flags))
            ]
            for module in self.paths:
                what = known_as(module)
                for rewrite in rewrites:
                    if isinstance(what, rewrite.known) and rewrite.may_be(module):
                        rewrite.apply(self, module)
                        break
        for flag in FLAGS:
            if flag in self.flags - self.done:
                left = (
                    "; left alone: " + ", ".join(dict.fromkeys(self.obstacles[flag]))
                    if self.obstacles[flag]
                    else ""
                )
                self.report.warnings.append(f"{flag}: nothing here is proved equal{left}")
        return self.report

    def become(self, module, what, parts, name):
        private.become(module, what, parts)
        self.report.add(
            name, what.kernel + ", trusted" * isinstance(module, self.trusted), what.column
        )
        self.done.update(what.flags)

    def leave(self, flags, name, why):
        self.report.left_alone[name, why] += 1
        for flag in flags:
            self.obstacles[flag].append(f"{name} ({why})")

    def once(self, function, *given):
        """``function(*given)``, which is called once for what it is given."""
        asked = function, *given
        if asked not in self.answers:
            self.answers[asked] = function(*given)
        return self.answers[asked]

    def proved_once(self, prove, module):
        if private.own_forward(module):
            return "its forward was replaced on the instance", ()
        known = self.proofs.setdefault((prove, outline(module)), [])
        for what, parts in known:
            if unchanged(module, parts):
                return what, parts
        why, reads = self.why_not(module), Reads()
        what = why or prove(module, reads)
        if not isinstance(what, str) and not isinstance(module, self.trusted):
            what = purity.why_not_read(module, reads.parts(), self.trusted) or what
        known.append((what, () if why else reads.parts()))
        return known[-1]

    def why_not(self, module, children=True) -> str | None:
        """Why no trial may speak for the module's code (`purity`)."""
        return purity.why_not(module, trusted=self.trusted, children=children)


def check_transformers() -> None:
    import transformers

    if TorchVersion(transformers.__version__) < OLDEST_TRANSFORMERS:
        raise ImportError(
            f"liger-kernel patches models of transformers {OLDEST_TRANSFORMERS} or newer, installed is "
            f"{transformers.__version__}: pip install -U transformers"
        )


def patch(
    model: torch.nn.Module, flags: dict[str, bool | int], trusted: tuple[type, ...] = ()
) -> Report:
    check_transformers()
    return _Walk(model, flags, trusted).run()


def revert_model(model: torch.nn.Module) -> None:
    for module in list(model.modules()):
        head.give_back(module)
        offloading.give_back(module)
        own = type(module).__dict__.get("_liger")
        if own is not None:
            for name in type(module)._liger_state:
                module.__dict__.pop(name, None)
            private.swap(module, own[0])
        elif hasattr(type(module), "_liger"):
            logger.warning(
                "revert: %s was given another class after it was patched, and stays",
                type(module).__name__,
            )
            continue
        if "_liger_loss_before" in module.__dict__:
            del module.__dict__["_loss_function"]
            before = module.__dict__.pop("_liger_loss_before")
            if before is not None:
                module.loss_function = before
