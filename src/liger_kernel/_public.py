"""The public names and import paths, and the modules that they are in.

An alias of a module is the same module object, so a patch of one is a patch of both.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from typing import NamedTuple


class Operator(NamedTuple):
    """The published names of one file of `liger_kernel.ops`, by package, separated by spaces.

    ops: autograd Functions in `liger_kernel.ops`.
    functional: functions in `liger_kernel.transformers.functional`.
    transformers: modules in `liger_kernel.transformers`.
    paths: further import paths of the file.
    """

    ops: str = ""
    functional: str = ""
    transformers: str = ""
    paths: str = ""


OPERATORS = {
    "attention.multi_token": Operator(
        ops="LigerMultiTokenAttentionFunction",
        functional="liger_multi_token_attention",
        transformers="LigerMultiTokenAttention",
        paths="ops.multi_token_attention transformers.multi_token_attention",
    ),
    "attention.neighborhood": Operator(
        ops="LigerFusedNeighborhoodAttentionFunction",
        functional="liger_fused_neighborhood_attention",
        paths="ops.fused_neighborhood_attention transformers.fused_neighborhood_attention",
    ),
    "embedding.embedding": Operator(
        ops="LigerEmbeddingFunction",
        functional="liger_embedding",
        paths="ops.experimental.embedding transformers.experimental.embedding",
    ),
    "head.cross_entropy": Operator(
        ops="LigerCrossEntropyFunction",
        functional="CrossEntropyOutput liger_cross_entropy",
        transformers="LigerCrossEntropyLoss",
        paths="ops.cross_entropy transformers.cross_entropy",
    ),
    "head.distillation": Operator(),
    "head.linear_cross_entropy": Operator(
        ops=(
            "LigerFusedLinearCrossEntropyFunction fused_linear_cross_entropy_backward "
            "fused_linear_cross_entropy_forward"
        ),
        functional="liger_fused_linear_cross_entropy",
        transformers="LigerFusedLinearCrossEntropyLoss",
        paths="ops.fused_linear_cross_entropy transformers.fused_linear_cross_entropy",
    ),
    "head.linear_jsd": Operator(
        ops="LigerFusedLinearJSDFunction",
        functional="liger_fused_linear_jsd",
        transformers="LigerFusedLinearJSD",
        paths="ops.fused_linear_jsd transformers.fused_linear_jsd",
    ),
    "head.linear_kl_div": Operator(
        ops="LigerFusedLinearKLDivFunction",
        functional="liger_fused_linear_kl_div",
        transformers="LigerFusedLinearKLDivLoss",
        paths="ops.fused_linear_kl_div transformers.fused_linear_kl_div",
    ),
    "head.scaled_cross_entropy": Operator(
        ops=(
            "LigerFusedLinearScaledCrossEntropyFunction "
            "LigerFusedLinearScaledCrossEntropyTPFunction"
        ),
        functional="liger_fused_linear_scaled_cross_entropy_tp",
    ),
    "head.selected_log_probs": Operator(functional="liger_selected_log_probs"),
    "head.token_log_probs": Operator(functional="linear_token_loss token_log_probs"),
    "head.vocab_parallel": Operator(
        ops="LigerVocabParallelCEFunction",
        functional="liger_vocab_parallel_cross_entropy",
        transformers="LigerVocabParallelCrossEntropy",
        paths="ops.vocab_parallel_cross_entropy transformers.vocab_parallel_cross_entropy",
    ),
    "linear.lora": Operator(functional="liger_lora_linear"),
    "mlp.activation": Operator(
        ops="LigerReLUSquaredFunction",
        functional="liger_relu_squared",
        transformers="LigerReLUSquared",
        paths="ops.relu_squared transformers.relu_squared",
    ),
    "mlp.activation_linear": Operator(functional="liger_activation_linear liger_glu_linear"),
    "mlp.glu": Operator(
        ops="LigerFusedGateUpSiLUMulFunction LigerGELUMulFunction LigerSiLUMulFunction",
        functional="liger_clamped_swiglu liger_geglu liger_swiglu",
    ),
    "mlp.lora_mlp": Operator(),
    "mlp.modules": Operator(
        transformers=(
            "LigerBlockSparseTop2MLP LigerFalconH1SwiGLUMLP LigerGEGLUMLP LigerPhi3SwiGLUMLP "
            "LigerQwen3MoeSwiGLUMLP LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer"
        ),
        paths="ops.geglu ops.swiglu transformers.geglu transformers.swiglu",
    ),
    "mlp.swiglu_mlp": Operator(
        ops="LigerMLPFunction",
        transformers="LigerFalconH1MLP LigerMLP",
        paths="transformers.mlp",
    ),
    "mlp.tiled_mlp": Operator(
        ops="LigerTiledMLPFunction apply_tiled_mlp",
        transformers="LigerTiledGEGLUMLP LigerTiledSwiGLUMLP",
        paths="ops.tiled_mlp transformers.tiled_mlp",
    ),
    "mlp.xielu": Operator(
        ops="LigerXIELUFunction",
        functional="liger_xielu",
        transformers="LigerXIELU",
    ),
    "mlp.xielu_linear": Operator(),
    "moe.expert_parallel": Operator(
        functional="liger_expert_parallel",
        paths="transformers.moe",
    ),
    "moe.experts": Operator(
        ops="LigerFusedMoEFunction",
        functional="liger_experts",
        transformers="LigerExperts",
        paths="ops.fused_moe",
    ),
    "moe.load_balancing": Operator(
        ops="LigerLoadBalancingFunction",
        functional="liger_load_balancing_loss",
    ),
    "moe.lora_experts": Operator(),
    "moe.router": Operator(
        ops="LigerRouterFunction",
        functional="liger_router",
    ),
    "norm.dyt": Operator(
        ops="LigerDyTFunction",
        functional="liger_dyt",
        transformers="LigerDyT",
        paths="ops.dyt transformers.dyt",
    ),
    "norm.fused_add_rms_norm": Operator(
        ops="LigerFusedAddRMSNormFunction",
        functional="liger_fused_add_rms_norm",
        transformers="LigerFusedAddRMSNorm",
        paths="ops.fused_add_rms_norm transformers.fused_add_rms_norm",
    ),
    "norm.gated_rms_norm": Operator(
        ops="LigerGatedRMSNormFunction",
        functional="liger_gated_rms_norm",
        transformers="LigerGatedRMSNorm",
    ),
    "norm.group_norm": Operator(
        ops="LigerGroupNormFunction",
        functional="liger_group_norm",
        transformers="LigerGroupNorm",
        paths="ops.group_norm transformers.group_norm",
    ),
    "norm.layer_norm": Operator(
        ops="LigerLayerNormFunction",
        functional="liger_layer_norm",
        transformers="LigerLayerNorm",
        paths="ops.layer_norm transformers.layer_norm",
    ),
    "norm.modulated_rms_norm": Operator(
        ops="LigerModulatedRMSNormFunction",
        functional="liger_modulated_rms_norm",
        transformers="LigerModulatedRMSNorm",
        paths="ops.modulated_rms_norm transformers.modulated_rms_norm",
    ),
    "norm.poly_norm": Operator(
        ops="LigerPolyNormFunction",
        functional="liger_poly_norm",
        transformers="LigerPolyNorm",
        paths="ops.poly_norm transformers.poly_norm",
    ),
    "norm.rms_norm": Operator(
        ops="LigerRMSNormFunction",
        functional="liger_rms_norm",
        transformers=(
            "LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 "
            "LigerRMSNormForGemma4 LigerRMSNormForGlm4 LigerRMSNormForMuseGlimmer "
            "LigerRMSNormForMuseGlimmerTextCentered LigerRMSNormForOlmo2 LigerRMSNormForQwen3Next"
        ),
        paths="ops.rms_norm transformers.rms_norm",
    ),
    "probability.ce_tvd": Operator(
        ops="LigerFusedCETVDFunction",
        functional="liger_fused_ce_tvd",
        transformers="LigerFusedCETVDLoss",
        paths="ops.fused_ce_tvd transformers.fused_ce_tvd",
    ),
    "probability.jsd": Operator(
        ops="LigerJSDFunction",
        functional="liger_jsd",
        transformers="LigerJSD",
        paths="ops.jsd transformers.jsd",
    ),
    "probability.kl_div": Operator(
        ops="LigerKLDivLossFunction",
        functional="liger_kl_div",
        transformers="LigerKLDIVLoss",
        paths="ops.kl_div transformers.kl_div",
    ),
    "probability.softmax": Operator(
        ops="LigerSoftmaxFunction",
        functional="liger_softmax",
        transformers="LigerSoftmax",
        paths="ops.softmax transformers.softmax",
    ),
    "probability.sparsemax": Operator(
        ops="LigerSparsemaxFunction",
        functional="liger_sparsemax",
        transformers="LigerSparsemax",
        paths="ops.sparsemax transformers.sparsemax",
    ),
    "recurrent.causal_conv": Operator(
        ops="LigerCausalConv1dFunction",
        functional="liger_causal_conv1d",
    ),
    "recurrent.gated_delta_rule": Operator(
        ops="LigerGatedDeltaRuleFunction",
        functional="liger_gated_delta_rule",
    ),
    "residual.attention_residuals": Operator(
        ops="LigerAttnResFunction",
        functional="liger_attn_res",
        paths="ops.attn_res",
    ),
    "residual.hyper_connections": Operator(
        ops="LigerMHCCoeffsFunction LigerMHCPostResFunction LigerMHCPreFunction",
        functional=(
            "liger_mhc_apply liger_mhc_coeffs liger_mhc_forward liger_mhc_post_res liger_mhc_pre"
        ),
        transformers="LigerMHC",
        paths="ops.mhc transformers.mhc",
    ),
    "rotary.llama4_rope": Operator(
        ops="LigerLlama4RopeFunction",
        transformers="liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb",
        paths="ops.llama4_rope transformers.llama4_rope",
    ),
    "rotary.multimodal_rope": Operator(
        ops="LigerQwen2VLMRopeFunction",
        functional="liger_qwen2vl_mrope",
        paths="ops.qwen2vl_mrope transformers.qwen2vl_mrope",
    ),
    "probability.tvd": Operator(
        ops="LigerTVDLossFunction",
        functional="liger_tvd",
        transformers="LigerTVDLoss",
        paths="ops.tvd transformers.tvd",
    ),
    "rotary.norm_rope": Operator(
        ops="LigerNormRopeFunction",
        functional="liger_norm_rope",
    ),
    "rotary.rope": Operator(
        ops="LigerRopeFunction",
        functional="liger_rope",
        transformers="liger_rotary_pos_emb",
        paths="ops.rope transformers.rope",
    ),
}
HOMES = {  # published import path -> module
    **{
        path: f"ops.{home}"
        for home, operator in OPERATORS.items()
        for path in operator.paths.split()
    },
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
    "chunked_loss.medusa_loss": "losses.medusa",
    "chunked_loss.orpo_loss": "losses.preference",
    "chunked_loss.simpo_loss": "losses.preference",
    "ops.grpo_loss": "losses.policy_on_logits",
    "transformers.functional": "ops.functional",
    "transformers.grpo_loss": "losses.policy_on_logits",
    "transformers.model.loss_utils": "patch.loss.causal_lm",
    "transformers.model.output_classes": "patch.loss.causal_lm",
    "transformers.monkey_patch": "patch.families.published",
}
_LCE_FORWARD = (
    "deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 glm4 glm4v glm4v_moe "
    "gpt_oss internvl llama llava ministral mistral mixtral muse_glimmer nemotron olmo2 olmo3 "
    "paligemma phi3 qwen2 qwen2_5_vl qwen2_vl qwen3 qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe "
    "smollm3 smolvlm"
)
FORWARDS_HOME = "patch.families.bound"
# modules of `liger_kernel.transformers.model`: their forwards, and the model types or classes that
# these are bound to
FORWARDS = {
    **{family: {"lce_forward": (family,)} for family in _LCE_FORWARD.split()},
    "gemma3": {"causal_forward": ("gemma3_text",), "multimodal_forward": ("gemma3",)},
    "gemma4": {"causal_forward": ("gemma4_text",), "multimodal_forward": ("gemma4",)},
    "hunyuan_v1": {"lce_forward": ("hunyuan_v1_dense", "hunyuan_v1_moe")},
    "llama4": {"lce_forward": ("llama4_text",)},
    "mllama": {"lce_forward": ("mllama.MllamaForCausalLM",)},
    "qwen3_5": {"lce_forward": ("qwen3_5_text",), "lce_forward_for_multimodal": ("qwen3_5",)},
    "qwen3_5_moe": {
        "lce_forward": ("qwen3_5_moe_text",),
        "lce_forward_conditional_generation": ("qwen3_5_moe",),
    },
}
# packages that have nothing but aliases
PACKAGES = {name.rpartition(".")[0] for name in HOMES} - {"chunked_loss", "ops", "transformers"}


def homes(column: str) -> dict[str, str]:
    """Return the names in a column of `OPERATORS`, and the file of `liger_kernel.ops` of each."""
    file_of_name = {}
    for home, operator in OPERATORS.items():
        file_of_name |= dict.fromkeys(getattr(operator, column).split(), home)
    return file_of_name


def forwards_of(path: str) -> str | None:
    """Return the family of a path ``transformers.model.<family>``, or None for another path."""
    package, _, family = path.rpartition(".")
    return family if package == "transformers.model" and family in FORWARDS else None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        root, _, name = fullname.partition(".")
        if root == "liger_kernel" and (name in HOMES or name in PACKAGES or forwards_of(name)):
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
        family = forwards_of(module.__name__.removeprefix("liger_kernel."))
        if family:
            bound = importlib.import_module(f"liger_kernel.{FORWARDS_HOME}")
            vars(module).update(bound.forwards(family))
        # the import system has just replaced the spec of the module by that of its alias
        spec = module.__spec__
        if spec.loader_state is not None:
            module.__spec__ = spec.loader_state
            module.__loader__ = spec.loader_state.loader


def install() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
