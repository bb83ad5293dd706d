"""What is public, and where it lives. An alias is the same module object as its home: who patches one patches both."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from typing import NamedTuple


class Operator(NamedTuple):
    """What is published of one file of `liger_kernel.ops`: names of three packages, and further import paths."""

    ops: str = ""  # `liger_kernel.ops`: autograd Functions
    functional: str = ""  # `liger_kernel.transformers.functional`
    transformers: str = ""  # `liger_kernel.transformers`: modules
    paths: str = ""


OPERATORS = {  # a line for each file
    "head.cross_entropy": Operator(
        "LigerCrossEntropyFunction", "CrossEntropyOutput liger_cross_entropy", "LigerCrossEntropyLoss",
        "ops.cross_entropy transformers.cross_entropy",
    ),
    "head.distillation": Operator(),
    "head.linear_cross_entropy": Operator(
        "LigerFusedLinearCrossEntropyFunction", "liger_fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss",
        "ops.fused_linear_cross_entropy transformers.fused_linear_cross_entropy",
    ),
    "head.scaled_cross_entropy": Operator(
        "LigerFusedLinearScaledCrossEntropyFunction LigerFusedLinearScaledCrossEntropyTPFunction",
        "liger_fused_linear_scaled_cross_entropy_tp",
    ),
    "head.token_log_probs": Operator(functional="linear_token_loss token_log_probs"),
    "mlp.glu": Operator(
        "LigerGELUMulFunction LigerSiLUMulFunction", "liger_geglu liger_swiglu",
        "LigerBlockSparseTop2MLP LigerFalconH1SwiGLUMLP LigerGEGLUMLP LigerPhi3SwiGLUMLP LigerQwen3MoeSwiGLUMLP "
        "LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer",
        "ops.geglu ops.swiglu transformers.geglu transformers.swiglu",
    ),
    "norm.fused_add_rms_norm": Operator(
        "LigerFusedAddRMSNormFunction", "liger_fused_add_rms_norm", "LigerFusedAddRMSNorm",
        "ops.fused_add_rms_norm transformers.fused_add_rms_norm",
    ),
    "norm.group_norm": Operator(
        "LigerGroupNormFunction", "liger_group_norm", "LigerGroupNorm", "ops.group_norm transformers.group_norm"
    ),
    "norm.layer_norm": Operator(
        "LigerLayerNormFunction", "liger_layer_norm", "LigerLayerNorm", "ops.layer_norm transformers.layer_norm"
    ),
    "norm.rms_norm": Operator(
        "LigerRMSNormFunction", "liger_rms_norm",
        "LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 LigerRMSNormForGemma4 "
        "LigerRMSNormForGlm4 LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered LigerRMSNormForOlmo2 "
        "LigerRMSNormForQwen3Next",
        "ops.rms_norm transformers.rms_norm",
    ),
    "probability.softmax": Operator(
        "LigerSoftmaxFunction", "liger_softmax", "LigerSoftmax", "ops.softmax transformers.softmax"
    ),
    "rotary.norm_rope": Operator("LigerNormRopeFunction", "liger_norm_rope"),
    "rotary.rope": Operator("LigerRopeFunction", "liger_rope", "liger_rotary_pos_emb", "ops.rope transformers.rope"),
}  # fmt: skip
HOMES = {  # published import path -> where the module is
    **{path: f"ops.{home}" for home, operator in OPERATORS.items() for path in operator.paths.split()},
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
    "transformers.functional": "ops.functional",
    "transformers.model.loss_utils": "patch.causal_lm",
    "transformers.model.output_classes": "patch.causal_lm",
    "transformers.monkey_patch": "patch.families",
}
PACKAGES = {name.rpartition(".")[0] for name in HOMES} - {
    "chunked_loss",
    "ops",
    "transformers",
}  # that hold nothing but aliases


def homes(column: str) -> dict[str, str]:
    """Each name that a package hands on -> the file of `liger_kernel.ops` that has it."""
    return {name: home for home, operator in OPERATORS.items() for name in getattr(operator, column).split()}


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
