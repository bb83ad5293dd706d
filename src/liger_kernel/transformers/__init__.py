"""Faster kernels for Hugging Face models: one line, one family, or single operators.

The operators need torch alone. What patches models needs transformers, and is imported when it is asked for.
"""

from importlib import import_module
from importlib.util import find_spec

from liger_kernel.ops.cross_entropy import LigerCrossEntropyLoss
from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNorm
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_kernel.ops.glu import (
    LigerBlockSparseTop2MLP,
    LigerFalconH1SwiGLUMLP,
    LigerGEGLUMLP,
    LigerPhi3SwiGLUMLP,
    LigerQwen3MoeSwiGLUMLP,
    LigerSwiGLUMLP,
    LigerSwiGLUMLPForMuseGlimmer,
)
from liger_kernel.ops.group_norm import LigerGroupNorm
from liger_kernel.ops.layer_norm import LigerLayerNorm
from liger_kernel.ops.rms_norm import (
    LigerRMSNorm,
    LigerRMSNormForGemma,
    LigerRMSNormForGemma2,
    LigerRMSNormForGemma3,
    LigerRMSNormForGemma4,
    LigerRMSNormForGlm4,
    LigerRMSNormForMuseGlimmer,
    LigerRMSNormForMuseGlimmerTextCentered,
    LigerRMSNormForOlmo2,
    LigerRMSNormForQwen3Next,
)
from liger_kernel.ops.rope import liger_rotary_pos_emb
from liger_kernel.ops.softmax import LigerSoftmax

__all__ = [
    "LigerBlockSparseTop2MLP",
    "LigerCrossEntropyLoss",
    "LigerFalconH1SwiGLUMLP",
    "LigerFusedAddRMSNorm",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerGEGLUMLP",
    "LigerGroupNorm",
    "LigerLayerNorm",
    "LigerPhi3SwiGLUMLP",
    "LigerQwen3MoeSwiGLUMLP",
    "LigerRMSNorm",
    "LigerRMSNormForGemma",
    "LigerRMSNormForGemma2",
    "LigerRMSNormForGemma3",
    "LigerRMSNormForGemma4",
    "LigerRMSNormForGlm4",
    "LigerRMSNormForMuseGlimmer",
    "LigerRMSNormForMuseGlimmerTextCentered",
    "LigerRMSNormForOlmo2",
    "LigerRMSNormForQwen3Next",
    "LigerSoftmax",
    "LigerSwiGLUMLP",
    "LigerSwiGLUMLPForMuseGlimmer",
    "is_transformers_available",
    "liger_rotary_pos_emb",
]
_FAMILIES = """
    deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text
    glm4 glm4v glm4v_moe gpt_oss granite hunyuan_v1_dense hunyuan_v1_moe internvl llama llama4 llava ministral
    mistral mixtral mllama muse_glimmer nemotron olmo2 olmo3 paligemma phi3 pixtral qwen2 qwen2_5_vl qwen2_vl
    qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe smollm3
    smolvlm
""".split()  # of families.py
_PATCHES = {
    "AutoLigerKernelForCausalLM": "auto_model",
    "MODEL_TYPE_TO_APPLY_LIGER_FN": "families",
    "_apply_liger_kernel": "families",
    "_apply_liger_kernel_to_instance": "families",
    "apply_liger_kernel": "families",
    "revert": "families",
}

_PATCHES |= {f"apply_liger_kernel_to_{family}": "families" for family in _FAMILIES}
__all__ += _PATCHES


def is_transformers_available() -> bool:
    return find_spec("transformers") is not None


def __getattr__(name):
    if name not in _PATCHES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not is_transformers_available():
        raise ImportError(f"{__name__}.{name} needs transformers: pip install 'liger-kernel[transformers]'")
    return getattr(import_module(f"{__name__}.{_PATCHES[name]}"), name)
