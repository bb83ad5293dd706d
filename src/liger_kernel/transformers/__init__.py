"""Faster kernels for Hugging Face models: one line, one family, or single operators.

The operators need torch alone; what patches models needs transformers. Either is imported when it is asked for. Type
checkers read ``__init__.pyi``, which ``scripts/stubs.py`` writes.
"""

from importlib import import_module
from importlib.util import find_spec

_OPERATORS = {
    "head.cross_entropy": "LigerCrossEntropyLoss",
    "norm.fused_add_rms_norm": "LigerFusedAddRMSNorm",
    "head.linear_cross_entropy": "LigerFusedLinearCrossEntropyLoss",
    "mlp.glu": """
        LigerBlockSparseTop2MLP LigerFalconH1SwiGLUMLP LigerGEGLUMLP LigerPhi3SwiGLUMLP LigerQwen3MoeSwiGLUMLP
        LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer
    """,
    "norm.group_norm": "LigerGroupNorm",
    "norm.layer_norm": "LigerLayerNorm",
    "norm.rms_norm": """
        LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 LigerRMSNormForGemma4
        LigerRMSNormForGlm4 LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered LigerRMSNormForOlmo2
        LigerRMSNormForQwen3Next
    """,
    "rotary.rope": "liger_rotary_pos_emb",
    "probability.softmax": "LigerSoftmax",
}
_FAMILIES = """
    deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text
    glm4 glm4v glm4v_moe gpt_oss granite hunyuan_v1_dense hunyuan_v1_moe internvl llama llama4 llava ministral
    mistral mixtral mllama muse_glimmer nemotron olmo2 olmo3 paligemma phi3 pixtral qwen2 qwen2_5_vl qwen2_vl
    qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe smollm3
    smolvlm
""".split()  # of families.py
_PATCHES = {
    "families": "MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel _apply_liger_kernel_to_instance apply_liger_kernel "
    "revert",
    "auto_model": "AutoLigerKernelForCausalLM",
}
_HOMES = {name: f"liger_kernel.ops.{home}" for home, names in _OPERATORS.items() for name in names.split()}
_NEED_TRANSFORMERS = {name: f"liger_kernel.patch.{home}" for home, names in _PATCHES.items() for name in names.split()}
_NEED_TRANSFORMERS |= {f"apply_liger_kernel_to_{family}": "liger_kernel.patch.families" for family in _FAMILIES}


def is_transformers_available() -> bool:
    try:
        return find_spec("transformers") is not None
    except ImportError:  # of a finder that blocks it
        return False


__all__ = ["is_transformers_available", *_HOMES, *(_NEED_TRANSFORMERS if is_transformers_available() else ())]


def __getattr__(name):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name not in _NEED_TRANSFORMERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not is_transformers_available():
        raise ImportError(f"{__name__}.{name} needs transformers: pip install 'liger-kernel[transformers]'")
    return getattr(import_module(_NEED_TRANSFORMERS[name]), name)


def __dir__():
    return sorted({*globals(), *__all__})
