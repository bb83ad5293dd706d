"""Where the public modules live. An alias is the same module object as its home: patching one patches the other."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys

HOMES = {
    "chunked_loss.cosine_similarity_loss": "losses.distillation",
    "chunked_loss.cpo_loss": "losses.preference",
    "chunked_loss.dpo_loss": "losses.preference",
    "chunked_loss.fused_linear_distillation": "losses.distillation",
    "chunked_loss.fused_linear_ppo": "losses.policy",
    "chunked_loss.fused_linear_preference": "losses.preference",
    "chunked_loss.fused_linear_unpaired_preference": "losses.preference",
    "chunked_loss.grpo_loss": "losses.policy",
    "chunked_loss.jsd_loss": "losses.distillation",
    "chunked_loss.kto_loss": "losses.preference",
    "chunked_loss.orpo_loss": "losses.preference",
    "chunked_loss.simpo_loss": "losses.preference",
    "ops.cross_entropy": "ops.head.cross_entropy",
    "ops.fused_add_rms_norm": "ops.norm.fused_add_rms_norm",
    "ops.fused_linear_cross_entropy": "ops.head.linear_cross_entropy",
    "ops.geglu": "ops.mlp.glu",
    "ops.group_norm": "ops.norm.group_norm",
    "ops.layer_norm": "ops.norm.layer_norm",
    "ops.rms_norm": "ops.norm.rms_norm",
    "ops.rope": "ops.rotary.rope",
    "ops.softmax": "ops.probability.softmax",
    "ops.swiglu": "ops.mlp.glu",
    "transformers.cross_entropy": "ops.head.cross_entropy",
    "transformers.functional": "ops.functional",
    "transformers.fused_add_rms_norm": "ops.norm.fused_add_rms_norm",
    "transformers.fused_linear_cross_entropy": "ops.head.linear_cross_entropy",
    "transformers.geglu": "ops.mlp.glu",
    "transformers.group_norm": "ops.norm.group_norm",
    "transformers.layer_norm": "ops.norm.layer_norm",
    "transformers.model.loss_utils": "patch.causal_lm",
    "transformers.model.output_classes": "patch.causal_lm",
    "transformers.monkey_patch": "patch.families",
    "transformers.rms_norm": "ops.norm.rms_norm",
    "transformers.rope": "ops.rotary.rope",
    "transformers.softmax": "ops.probability.softmax",
    "transformers.swiglu": "ops.mlp.glu",
}
PACKAGES = {name.rpartition(".")[0] for name in HOMES} - {
    "chunked_loss",
    "ops",
    "transformers",
}  # that hold nothing but aliases


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        root, _, name = fullname.partition(".")
        if root == "liger_kernel" and (name in HOMES or name in PACKAGES):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=name in PACKAGES)
        return None

    def create_module(self, spec):
        home = HOMES.get(spec.name.removeprefix("liger_kernel."))
        if home is None:
            return None
        module = importlib.import_module(f"liger_kernel.{home}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        spec = module.__spec__  # the import system has just set the alias's: give the home its own back
        if spec.loader_state is not None:
            module.__spec__ = spec.loader_state
            module.__loader__ = spec.loader_state.loader


def install() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
