"""The losses' Functions as functions, with positional arguments in the order of their forward."""

from liger_kernel.losses.distillation import liger_fused_linear_cosine, liger_fused_linear_jsd
from liger_kernel.losses.policy import liger_fused_linear_grpo
from liger_kernel.losses.preference import (
    liger_fused_linear_cpo,
    liger_fused_linear_dpo,
    liger_fused_linear_kto,
    liger_fused_linear_orpo,
    liger_fused_linear_simpo,
)

__all__ = [
    "liger_fused_linear_cosine",
    "liger_fused_linear_cpo",
    "liger_fused_linear_dpo",
    "liger_fused_linear_grpo",
    "liger_fused_linear_jsd",
    "liger_fused_linear_kto",
    "liger_fused_linear_orpo",
    "liger_fused_linear_simpo",
]
